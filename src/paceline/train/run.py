"""`Run`: one training, from joining the ranks to the last checkpoint, for every loop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from paceline import handover, terminal
from paceline.config import RunConfig
from paceline.data.reading.batches import Batches, RankBatch
from paceline.data.reading.collate import Collate
from paceline.data.reading.comparison import DataComparison, name_of
from paceline.errors import ConfigError
from paceline.events import Sink
from paceline.exact.strategy import Strategy
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.carried import carried_variables
from paceline.train.likely_mistakes import missing_of_run, refuse_no_config, refuse_other_call
from paceline.train.run_folder import RunFolder
from paceline.train.run_loop import RunLoop
from paceline.train.run_objects import RunObjects
from paceline.train.run_step import Step, with_length
from paceline.train.saving.run_state import Registered
from paceline.train.script_state import GENERATORS, ScriptState
from paceline.train.script_steps import ScriptSteps
from paceline.train.uncaught import show_briefly
from paceline.train.unusual_calls import UnusualCalls
from paceline.world.process_group import join
from paceline.world.randomness import seed_everything
from paceline.world.world import World

_UPDATE = "call run.update(optimizer, loss, step), where loss(batch) returns the loss"


class Run(RunObjects):
    """One training on any number of ranks: joins them, restores, saves, stops, and reports.

    - `config`: the settings of the run.
    - `sinks`: functions that are called with every event on rank 0; they cannot change the training.
    - `callbacks`: objects of `paceline.Callback`, called at the same moments on every rank.

    It is used in a `with` statement, which opens and locks the folder `runs/NAME`. After an exception nothing is
    saved, and the exception is the failure of the run. The same command again resumes from the newest intact
    checkpoint, on any number of ranks.

    >>> def main(config):
    ...     with paceline.Run(config) as run:
    ...         model = run.model(torch.nn.Linear(4, 1))
    ...         optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ...         for step in run.steps((torch.randn(512, 4),), epochs=1):
    ...             run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
    >>> main(paceline.RunConfig(name="linear"))
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        refuse_no_config(config)
        self.config = config
        """The settings of the run."""
        self._sinks = sinks
        self._stack = contextlib.ExitStack()
        self._parts = Registered()
        self._loop: RunLoop | None = None
        self._callbacks = Callbacks(self, callbacks, self._poisoning)
        self._callbacks.track(self._parts.tracked)
        self._named_changes = set()
        self._script_state = ScriptState(self._parts, callbacks)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_of_run(name, self)

    def __enter__(self) -> Self:
        if handover.LAUNCHER not in os.environ:  # ours reads to the end
            terminal.outlive_reader()
        try:
            self.world = self._stack.enter_context(self._joined())
            self._strategy = Strategy.of(self.world, self.config)
            self._folder = RunFolder(self.config, self.world, self._sinks)
            self._stack.enter_context(self._folder.opened(self._done))
        except BaseException as error:
            show_briefly(error)
            self._stack.__exit__(*sys.exc_info())
            raise
        return self

    def _joined(self) -> contextlib.AbstractContextManager[World]:
        return join(self.config)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._conclude()
            except BaseException as last:
                show_briefly(last)
                self._stack.__exit__(*sys.exc_info())
                raise
        show_briefly(error)
        self._stack.__exit__(kind, error, trace)

    def _done(self) -> int:
        return self._loop.done if self._loop else 0

    def _conclude(self) -> None:
        """Complete a step that the loop was left in, and report the end of the run."""
        if self._loop is None:
            self._mention_missing_loop()
            return
        if self._step is not None:
            self._refuse_rebuilt_model()
            self._unusual.leave()
            self._loop.state.finished = self._loop.state.finished or "the script left the loop"
            self._complete_step()
        self._refuse_idle()
        self._loop.conclude()
        self._callbacks.call("run_end")

    def _refuse_idle(self) -> None:
        """Raise if a run that is compared or measured has trained nothing."""
        assert self._loop is not None
        is_idle = not self._loop.is_first and not self._script_steps.trains
        if self.config.only_measures and is_idle:
            raise ConfigError(
                "no step has called run.update, so there is nothing to compare or measure",
                fix=_UPDATE,
            )

    def _refuse_rebuilt_model(self) -> None:
        """Raise if the model has lost parameters of the optimizer after `break`: the step before is not saved yet."""
        assert self._loop is not None
        if not self._loop.state.fits_optimizer:
            raise ConfigError(
                "the script has left the loop with break or return, and then replaced parameters of the model: its last step can no longer be saved",
                fix='call run.finish("reason") in the loop instead of break: the run is then saved before the model is rebuilt',
            )

    def _mention_missing_loop(self) -> None:
        """Say that a script which prepared a training has not trained; others may only evaluate."""
        if self._parts.optimizers and self._made is None:
            self._warn(
                "the script ended without run.steps(...): nothing is saved, and each rank did the whole work",
                f"loop over `for step in run.steps(loader)`, and in it {_UPDATE}",
            )

    def _warn(self, what: str, fix: str) -> None:
        if self.is_main:
            terminal.error(f"warning: {what}\n  fix: {fix}")

    def steps(
        self,
        data: Any,
        *,
        collate: Collate | None = None,
        epochs: int = 0,
        steps: int = 0,
        flops_per_sample: float = 0.0,
    ) -> Iterator[Step]:
        """Return the steps that are left, from the newest checkpoint on. The run saves and stops between them.

        - `data`: tensors, a map-style dataset, a dict of datasets, `open_dataset(...)`, a DataLoader or a `Stream`. The batch size of a
          DataLoader counts all ranks.
        - `collate`: `collate(samples)` makes a batch of the samples of one micro-batch (lane).
        - `epochs`: epochs to train, instead of the default of the config.
        - `steps`: optimizer steps to train, instead of epochs.
        - `flops_per_sample`: floating-point operations of one sample, forward and backward; the run then reports its
          model FLOPs utilization (MFU).

        Settings on the command line come before these arguments. A run has one such loop. If it is asked to stop, it
        saves and exits with code 75 between two steps.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=2):
        ...         print(step.index, step.epoch, step.ends_epoch)
        0 0 False
        1 0 True
        2 1 False
        3 1 True
        """
        self._check_loop()
        self._script_state.refuse_untracked(sys._getframe(1))  # noqa: SLF001 - the caller's variables
        config = with_length(self.config, epochs, steps)
        batches = Batches(data, config, self.world, collate=collate)
        if (facts := batches.read_facts()) is not None:
            DataComparison(self.world).compare(facts, name_of(data), "run.steps")
        return self._begin_loop(batches, flops_per_sample)

    def _check_loop(self) -> None:
        if self._loop is not None:
            raise ConfigError(
                "run.steps was called twice in one run",
                fix='loop once; to read two datasets, call run.steps({"a": one, "b": other})',
            )
        if not self._parts.optimizers:
            raise ConfigError(
                "the run has no optimizer",
                fix="call run.optimizer(torch.optim.AdamW(model.parameters())) before run.steps(...)",
            )

    def _begin_loop(self, batches: Batches, flops_per_sample: float) -> Iterator[Step]:
        """Restore the newest checkpoint; return the steps that are left."""
        self.config = batches.config
        self._loop = RunLoop(
            self.world,
            self.config,
            self._strategy,
            self._folder,
            self._parts,
            batches,
            flops_per_sample,
        )
        self._stack.enter_context(self._loop.running())
        self._stack.callback(self._loop.updates.close)
        self._loop.notify(self._callbacks)
        left = self._loop.begin()
        self._script_steps = ScriptSteps(self._parts.optimizers.values())
        self._script_steps.watch()
        self._unusual = UnusualCalls(self._loop.observers.unusual)
        self._stack.callback(self._script_steps.ignore)
        self._callbacks.call("run_start")
        if self.is_main:
            caller = sys._getframe(2)  # noqa: SLF001 - the variables of the script
            self._script_state.watch(caller)
            self._name_carried(carried_variables(caller))
        return _Steps(self, left)

    def _name_carried(self, names: list[str]) -> None:
        """Say which variables the script carries from step to step."""
        if names:
            self._warn(
                f"the loop carries {', '.join(names)} from step to step, and no checkpoint holds "
                f"{'it' if len(names) == 1 else 'them'}: a resumed run would begin with the first value",
                "compute it from step.index, or keep it in an object with state_dict and load_state_dict and call "
                "run.track(state=object) before run.steps(...)",
            )

    def _look_again(self, frame: FrameType) -> None:
        """Look at the end of a step for what the script keeps: made since `run.steps`, or changed since."""
        if self._step is None or self._loop is None:
            return
        if self._loop.is_first:
            self._script_state.refuse_untracked(frame)
        found = self._script_state.changed(self._loop.steps_of_start + 1) if self.is_main else []
        for variable in found:
            name = variable.name
            fix = f"call run.track({variable.word}={name}) before run.steps(...)"
            if isinstance(variable.value, GENERATORS):
                fix = "draw from the global generators of torch, NumPy or Python, which the run seeds for every step"
            self._warn(
                f"{name} changes in the loop, and no checkpoint holds it: a resumed run would begin with a new one",
                f"{fix}; or, if the script sets it anew, run.untracked({name})",
            )

    def _next_step(self, batches: Iterator[RankBatch]) -> Step:
        """Complete the current step and begin the next; raise StopIteration after the last."""
        assert self._loop is not None
        enough = False
        if self._step is not None:
            self._unusual.end_step()
            enough = self._complete_step()
        if enough or self._loop.is_over:
            self._loop.end()
            if self._loop.ends_script:
                self._refuse_idle()
                raise SystemExit(0)
            raise StopIteration
        plan = self._loop.next_plan()
        step = Step(plan, evaluates=self._loop.evaluation_is_due(plan))
        seed_everything(self.config.seed, plan.index)
        if plan.within == 0:
            self._callbacks.call("epoch_start", step)
        self._loop.refuse_changed_dataset()
        batch = next(batches)
        seed_everything(self.config.seed, plan.index)
        self._loop.begin_step(batch)
        step._read = batch  # noqa: SLF001 - the run made it
        self._step, self._sums, self._updates = step, None, 0
        self._unusual.begin_step(plan.index)
        self._callbacks.call("step_start", step)
        return step

    def _complete_step(self) -> bool:
        assert self._loop is not None
        assert self._step is not None
        self._script_steps.refuse_changed_gradients()
        if self._loop.is_first:
            self._step._refuse_ignored_evaluation(self.config)  # noqa: SLF001 - the run made it
        self._callbacks.end_step(self._step, self._loop.batches.total_steps)
        if self._script_steps.is_idle_for_long(ends_epoch=self._step.ends_epoch):
            self._warn("no step until now has called run.update, so nothing was trained", _UPDATE)
        batch, self._step = self._step._batch, None  # noqa: SLF001 - the run made it
        sums = self._sums or self._loop.agree_without_update()
        return self._loop.complete(batch, sums)

    def finish(self, reason: str) -> None:
        """End the loop after this step; the run is then complete. Every rank must call this.

        - `reason`: why, for the report.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=100):
        ...         if step.index == 2:
        ...             run.finish("good enough")
        >>> step.index
        2
        """
        self._running().state.finished = reason or "finished by the script"
        self._unusual.finish(sys._getframe(1))  # noqa: SLF001 - the line of the script

    def save(self) -> None:
        """Save a checkpoint after this step, in addition to those of `checkpoint.every`.

        After the loop it is not needed: if the script changes the model there, the weights are saved at the end of the
        `with` block, apart from the checkpoints. `paceline ckpt export` prefers them, and a resume never loads them.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         if step.index == 0:
        ...             run.save()
        """
        self._running().save_requested = True

    @refuse_other_call("run.log(name=value)")
    def log(self, **values: Any) -> None:
        """Report numbers with this step: on the console, in events.jsonl and to the loggers.

        - `values`: numbers by their names, the same on every rank.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         run.log(temperature=0.5)
        """
        self._running().logged.update({name: float(value) for name, value in values.items()})


class _Steps(Iterator[Step]):
    """The iterator of `run.steps`."""

    def __init__(self, run: Run, batches: Iterator[RankBatch]) -> None:
        self._run, self._batches = run, batches

    def __next__(self) -> Step:
        caller = sys._getframe(1)  # noqa: SLF001 - the loop
        self._run._unusual.begin_loop(caller)  # noqa: SLF001
        self._run._look_again(caller)  # noqa: SLF001 - the variables of the loop
        return self._run._next_step(self._batches)  # noqa: SLF001 - one thing in two classes
