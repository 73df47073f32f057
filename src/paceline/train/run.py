"""`Run`: one training, from joining the ranks to the last checkpoint, for every loop."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn

from paceline import handover, terminal
from paceline.config import RunConfig
from paceline.config.lanes import AutoLanes
from paceline.data.reading.batches import Batches, RankBatch
from paceline.data.reading.collate import Collate
from paceline.data.reading.comparison import DataComparison, name_of
from paceline.errors import ConfigError, PacelineError, TrainingError
from paceline.events import Sink
from paceline.exact.buffers import refuse_wrong_rules
from paceline.exact.lanes import UpdateCall
from paceline.exact.loss import Losses, LossFunction
from paceline.exact.parallel import prepare
from paceline.exact.row import StepSums
from paceline.exact.strategy import Strategy
from paceline.exact.unsupported import refuse_closures, refuse_hooks, refuse_modules
from paceline.hang.rank_report import DEBUGGED, WAITS_FOR_DEBUGGER
from paceline.launch.traceback_text import traceback_text
from paceline.scale.batch import LaneChoice
from paceline.train.callbacks import Callback, Callbacks
from paceline.train.carried import carried_variables, numbers_around
from paceline.train.debugger import Debugger, check_rank
from paceline.train.evaluation.inference import Inference, Pass, Score, gather_in_order
from paceline.train.examiner import Examiner, load_examiner
from paceline.train.likely_mistakes import (
    missing_of_run,
    refuse_no_config,
    refuse_no_module,
    refuse_no_optimizer,
    refuse_other_call,
)
from paceline.train.observers.console import say
from paceline.train.run_folder import RunFolder, saved_lanes
from paceline.train.run_loop import RunLoop
from paceline.train.run_step import Step, with_length, with_requests_of
from paceline.train.saving.checkpointing import shorten
from paceline.train.saving.module_values import ForwardChanges
from paceline.train.saving.run_state import Registered, SavedNames
from paceline.train.script_state import GENERATORS, ScriptState
from paceline.train.script_steps import ScriptSteps
from paceline.train.unusual_calls import UnusualCalls
from paceline.world.collectives import all_gather_texts, broadcast_from_main
from paceline.world.process_group import Joined, join_run, wait_for_all
from paceline.world.randomness import seed_everything
from paceline.world.world import World

_UPDATE = "call run.update(optimizer, loss, step), where loss(batch) returns the loss"
Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
_KEEP_IN_MODEL = (
    "if a loss depends on it, make it a buffer (register_buffer) or compute it from step.index"
)
_KEEP_IN_LOOP = (
    "return such values from the loss, and keep what you compute of them in the loop, in an object with state_dict "
    "that run.track saves"
)
_UPDATES_TO_WATCH = 2
"""Updates of each start in which the numbers of modules are compared before and after."""
_WITH_SEED, _BY_STEP = 1, 2  # keep the random numbers of each apart


class Run:
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

    config: RunConfig
    """The settings of the run; in the `with` block with the number of its lanes."""
    world: World
    """This rank among all ranks."""

    def __init__(
        self,
        config: RunConfig,
        *,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        refuse_no_config(config)
        self.config, self._sinks = config, sinks
        self._stack = contextlib.ExitStack()
        self._parts = Registered()
        self._callbacks = Callbacks(self, callbacks, self._poisoning)
        self._callbacks.track(self._parts.tracked)
        self._script_state = ScriptState(self._parts, callbacks)
        self._strategy: Strategy
        """Known in the `with` block, like `world` and the folder."""
        self._folder: RunFolder
        self._examiner: Examiner | None = None
        self._loop: RunLoop | None = None
        """Known after `run.steps`, like the two below."""
        self._script_steps: ScriptSteps
        self._unusual: UnusualCalls
        self._step: Step | None = None
        self._sums: StepSums | None = None
        """Those of the first update of the current step, with the requests of all."""
        self._updates = self._most_updates = self._first_updates = 0
        """Updates of the current step, the most that a step of this start has had, and those whose changes are watched."""
        self._failed = ""
        """The error that has left an update."""
        self._named_changes: set[str] = set()
        self._debugger: Debugger | None = None
        self._made: tuple[RunConfig, Inference] | None = None
        self._predictions = (-1, 0)
        """The steps that were done at the last prediction without a seed, and how many came at this point."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_of_run(name, self)

    def __enter__(self) -> Self:
        if handover.LAUNCHER not in os.environ:  # ours reads to the end
            terminal.outlive_reader()
        try:
            given = self.config
            self.world, self.config = self._stack.enter_context(self._joined())
            if isinstance(given.batch.lanes, AutoLanes):
                # A loss may read the script's own config, and must find the number of the run there. It stays
                # automatic, so that another run with the same settings takes its own number.
                object.__setattr__(given.batch, "lanes", AutoLanes(self.config.batch.lanes))
            self._strategy = Strategy.of(self.world, self.config)
            self._examiner = load_examiner(self.config, self.world)
            self._folder = RunFolder(self.config, self.world, self._sinks)
            self._stack.enter_context(self._folder.opened(self._done))
        except BaseException as error:
            show_briefly(error)
            self._stack.__exit__(*sys.exc_info())
            raise
        return self

    def _joined(self) -> contextlib.AbstractContextManager[Joined[RunConfig]]:
        return join_run(self.config, saved_lanes)

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

    # The objects of a run

    def model(
        self,
        model: Model,
        *,
        name: str = "",
        saved: SavedNames | None = None,
        wrap: tuple[type[nn.Module], ...] | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> Model:
        """Move a model to this rank's device, or shard it there, with the weights of rank 0; return the same object.

        - `model`: any `nn.Module`; copies of it, such as an EMA, must be made before.
        - `name`: the name of this model in checkpoints, if the run has several.
        - `saved`: `saved(name)` tells whether checkpoints hold a weight, for example only those of LoRA adapters.
        - `wrap`: the classes of the modules that parallel=fsdp gathers one at a time; without it, those in every ModuleList.
        - `buffers`: rules for buffers that forward changes, by name or pattern: `{"load": "sum", "*.max_val": "max"}`. A pattern may match
          the dotted name or the last part of it; the last one that matches counts. Rules are mean (of the lanes' changes, as without a
          rule), sum, max, min and last (the value of the last lane).

        It must be called before `run.steps`, and before the optimizer is made.

        >>> with paceline.Run(config) as run:
        ...     model = torch.nn.Linear(4, 1)
        ...     run.model(model) is model
        True
        """
        self._refuse_late("run.model")
        refuse_no_module(model)
        refuse_modules(model, self.config)
        refuse_hooks(model, self.config)
        refuse_wrong_rules(model, buffers or {})
        prepare(model, self.world, self.config, self._strategy, wrap)
        self._parts.add_model(model, name, saved, buffers)
        return model

    def optimizer(self, optimizer: Optimizer, *, name: str = "") -> Optimizer:
        """Save and restore an optimizer with the run; return the same object.

        - `optimizer`: any `torch.optim.Optimizer`; a parameter belongs to one optimizer only.
        - `name`: the name of this optimizer in checkpoints, if the run has several.

        It must be called before `run.steps`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ...     run.optimizer(optimizer) is optimizer
        True
        """
        self._refuse_late("run.optimizer")
        refuse_no_optimizer(optimizer)
        refuse_closures(optimizer)
        self._parts.add_optimizer(optimizer, name)
        return optimizer

    @refuse_other_call("run.track(scheduler=scheduler, ema=ema), with a name for each object")
    def track(self, **objects: Any) -> None:
        """Save and restore other objects with the run: schedulers, an EMA, counters.

        - `objects`: objects with `state_dict` and `load_state_dict`, by the names that they have in checkpoints.

        The states may hold numbers, strings, tensors, lists, tuples and dicts; anything else is refused by name. With a
        tracked scheduler, Paceline leaves the learning rate to it. It must be called before `run.steps`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        ...     run.track(scheduler=scheduler)
        """
        self._refuse_late("run.track")
        for name, item in objects.items():
            if isinstance(item, nn.Module):
                item.to(self.world.device)
            self._parts.tracked.add(name, item)

    def untracked(self, *objects: Any) -> None:
        """Accept that checkpoints do not hold the state of these objects, because the script sets it from the step.

        - `objects`: schedulers, copies of models, generators; or an optimizer whose rate a scheduler sets.

        Without this, `run.steps` refuses schedulers that are not tracked.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        ...     run.untracked(scheduler)
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)
        ...         scheduler.last_epoch = step.index
        ...         scheduler.step()
        """
        self._script_state.derive(objects)

    def _refuse_late(self, call: str) -> None:
        if self._loop is not None:
            raise ConfigError(
                f"{call} was called after run.steps: the checkpoint is restored already",
                fix=f"call {call} before the loop over run.steps(...)",
            )

    # The loop

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
        batches = Batches(data, config, self.world, collate=collate, choice=self._choice)
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
            self._examiner,
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
            if self.config.record.ends_script:
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

    # Updates

    @refuse_other_call("run.update(optimizer, loss, step), where loss is a function of a batch")
    def update(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        clip: float | None = None,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Add the gradients of all samples of the step, clip them, and change the weights of one optimizer.

        - `optimizer`: the optimizer whose parameters get gradients; others keep theirs.
        - `loss`: `loss(batch)` is called once per micro-batch (lane). It returns the mean over its samples, (sum, count), or
          a dict with the key "loss" and other values.
        - `step`: the step that `run.steps` gave last.
        - `clip`: the largest norm of the gradients; None: `clip_norm` of the config.
        - `over_batch`: for a loss over all samples of the step, such as a contrastive one: `loss` then returns one row
          per sample, and `over_batch(rows)` is the loss over the rows of all ranks.

        It returns the means over all samples: `float(found)` is the loss, `found["size"]` another value. Every rank must
        call this.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     def loss(batch):
        ...         return {"loss": model(batch[0]).square().mean(), "size": 3.0}
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.update(optimizer, loss, step, clip=1.0)
        >>> found["size"]
        3.0
        """
        loop, norm = self._running(), self.config.clip_norm
        if clip is not None:
            norm = clip
            loop.by_script.note(loop.done, "clip_norm", clip, "clip= of run.update")
        return self._run(loop.updates.update, optimizer, loss, step, norm, over_batch)

    @refuse_other_call("run.backward(optimizer, loss, step), where loss is a function of a batch")
    def backward(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Leave the gradients of all samples of the step in `grad`: `update` without clipping and stepping.

        - `optimizer`: the optimizer whose parameters get gradients.
        - `loss`: as for `update`.
        - `step`: the step that `run.steps` gave last.
        - `over_batch`: as for `update`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.backward(optimizer, lambda batch: model(batch[0]).mean(), step)
        ...         torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        ...         optimizer.step()
        >>> model.weight.grad.shape
        torch.Size([1, 4])
        """
        loop = self._running()
        loop.updates.refuse_backward()
        loop.by_script.note(
            loop.done, "clip_norm", "chosen", "the script, which calls run.backward"
        )
        found = self._run(loop.updates.backward, optimizer, loss, step, 0.0, over_batch)
        self._script_steps.watch(after="run.backward", of=optimizer)
        return found

    def _run(
        self,
        function: Callable[[UpdateCall], tuple[Losses, StepSums]],
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        clip_norm: float,
        over_batch: Callable[[Tensor], Tensor] | None,
    ) -> Losses:
        _check_arguments(optimizer, loss)
        self._check_current(step)
        batch = step._batch  # noqa: SLF001 - the run made it
        number, self._updates = self._updates, self._updates + 1
        name = f"run.{function.__name__}"
        self._unusual.update(name, sys._getframe(3))  # noqa: SLF001 - the line of the script
        if number >= max(1, self._most_updates):
            self._agree_on_update(number, batch.plan.index)
        self._most_updates = max(self._most_updates, number + 1)
        call = UpdateCall(optimizer, loss, batch, number, clip_norm, over_batch)
        self._script_steps.refuse_changed_gradients()
        self._script_steps.ignore()  # the run steps now; and torch.compile must not find a hook
        is_new = self._first_updates < _UPDATES_TO_WATCH
        watched = ForwardChanges(self._parts.model) if is_new else None
        numbers = numbers_around(loss) if is_new else {}
        with self._poisoning():
            losses, sums = function(call)
        if watched is not None:
            self._first_updates += 1
            self._name_changes("forward", watched.names(), _KEEP_IN_MODEL)
            # Only the loss can have changed these: it alone has run in between.
            now = numbers_around(loss)
            changed = [name for name in numbers if numbers[name] != now.get(name)]
            self._name_changes("the loss", changed, _KEEP_IN_LOOP)
        self._script_steps.watch(after="run.update", of=optimizer)
        seed_everything(self.config.seed, batch.plan.index, -1 - number)
        self._sums = sums if self._sums is None else with_requests_of(self._sums, sums)
        return losses

    def _agree_on_update(self, number: int, step: int) -> None:
        """Raise unless all ranks take one update more than in any step before. Every rank must call this.

        Else the ranks that do not would add their next step to the update of those that do, without an error.
        """
        texts = all_gather_texts(self.world, f"update {number + 1} of step {step + 1}")
        if len({*texts}) > 1:
            raise TrainingError(
                f"the ranks do not take the same updates: {'; '.join(dict.fromkeys(texts))}",
                fix="call run.update equally often on every rank",
            )

    def _name_changes(self, who: str, names: list[str], fix: str) -> None:
        """Name, once each, numbers that forward or the loss has changed."""
        new = [name for name in names if name not in self._named_changes]
        self._named_changes.update(new)
        if new and self.is_main:
            terminal.error(
                f"warning: {who} changes {shorten(new)}. Each rank does so for its own lanes, and no checkpoint holds it\n"
                f"  fix: {fix}"
            )

    def _check_current(self, step: Step) -> None:
        if self._failed:
            raise TrainingError(
                f"an earlier update of this run failed: {self._failed}",
                fix="let the error end the run; the same command resumes from the newest checkpoint",
            )
        if not isinstance(step, Step):
            raise ConfigError(
                f"the third argument of run.update must be the step, got a {type(step).__name__}",
                fix="loop by `for step in run.steps(...)`, and call run.update(optimizer, loss, step); step.index counts",
            )
        if step is not self._step:
            raise ConfigError(
                f"step {step.index} is over",
                fix="use the step that `for step in run.steps(...)` gave last",
            )

    @contextlib.contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Let no update follow one that has failed: the ranks may differ."""
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def _running(self) -> RunLoop:
        if self._loop is None:
            raise ConfigError(
                "the run has no loop yet", fix="call this inside of `for step in run.steps(...)`"
            )
        return self._loop

    # What the body of the loop may ask for

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

    def stop(self, reason: str) -> None:
        """Save after this step or the next one and exit with code 75, to be resumed. One rank is enough to ask.

        - `reason`: why, for the report.

        >>> with contextlib.suppress(SystemExit), paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps(torch.randn(512, 4), epochs=100):
        ...         run.stop("the machine is needed elsewhere")
        """
        if self._loop is None:
            raise ConfigError(
                f"run.stop({reason!r}) was called before the loop, when there is nothing to save",
                fix="call it inside of `for step in run.steps(...)`, or leave the script with sys.exit",
            )
        self._loop.request_stop(reason)

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

    def breakpoint(self, rank: int = 0) -> None:
        """Open pdb here on one rank. Every rank must call this, in the body of the loop.

        - `rank`: the rank whose variables you want to see.

        The others wait; no time-out and no watchdog ends that. Type c to continue.

        >>> def look(run, losses):
        ...     if float(losses) > 100:  # the same on every rank
        ...         run.breakpoint(rank=1)
        """
        check_rank(rank, self.world)
        if self._debugger is None:
            self._debugger = Debugger(self.world)
        doing = DEBUGGED if self.world.rank == rank else WAITS_FOR_DEBUGGER
        with contextlib.ExitStack() as stack:
            if self._loop is not None:
                stack.enter_context(self._loop.hold(doing))
            self._debugger.hold(rank, sys._getframe(1))  # noqa: SLF001 - the caller's, as pdb.set_trace does

    # Evaluation

    def evaluate(
        self,
        data: Any,
        score: Score,
        *,
        metrics: Mapping[str, Any] | None = None,
        collate: Collate | None = None,
        batches: int = 0,
    ) -> dict[str, float]:
        """Return the mean of every value of `score(batch)` over a dataset. Every rank must call this.

        - `data`: as for `run.steps`, but not a stream; every sample counts once. A dict of datasets is evaluated one by
          one: {"val": a, "test": b} gives val/acc and test/acc.
        - `score`: returns a dict: a value is a tensor with one entry per sample, or (sum, count).
        - `metrics`: torchmetrics objects by name; the value of that name is what their `update` takes:
          {"f1": (preds, target)}.
        - `collate`: as for `run.steps`.
        - `batches`: take only the first batches of each dataset, for a trial that callbacks are not told of; 0: all.

        Models are in eval mode meanwhile; afterwards modes, buffers and random generators are as before. The score draws
        the same random numbers in every call, so that two evaluations differ by the model alone. Inside of the loop the
        means are reported with the step.

        >>> with paceline.Run(config) as run:
        ...     run.evaluate((torch.arange(8.0),), lambda batch: {"mean": batch[0]})
        {'mean': 3.5}
        """
        found: dict[str, float] = {}
        for prefix, dataset in _named_datasets(data).items():
            with self._pass(dataset, collate) as over:
                values = self._inference.evaluate(over, score, metrics or {}, batches)
            found |= {f"{prefix}{name}": value for name, value in values.items()}
        if self._loop is not None:
            self._loop.metrics.update(found)
        if not batches:
            self._callbacks.call("evaluation_end", found)
        return found

    @overload
    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        seed: int | None = None,
    ) -> Any: ...

    @overload
    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        to: str | Path,
        seed: int | None = None,
    ) -> None: ...

    def predict(
        self,
        data: Any,
        function: Callable[[Any], Any],
        *,
        collate: Collate | None = None,
        to: str | Path = "",
        seed: int | None = None,
    ) -> Tensor | dict[str, Tensor] | None:
        """Return the rows of `function(batch)` for all samples, in dataset order, on the CPU of every rank.

        Every rank must call this.

        - `data`: as for `run.evaluate`.
        - `function`: returns a tensor with one row per sample, or a dict of such tensors.
        - `collate`: as for `run.steps`.
        - `to`: a folder; the rows are written there as shards for `paceline.open_dataset`, and no rank holds them all. A
          list with one vector per sample is then a column of varying length.
        - `seed`: the function draws the same random numbers in every call with this seed. None: other ones in every call,
          keyed by the step and the number of the call in it: the same on any number of ranks and after a resume.

        >>> with paceline.Run(config) as run:
        ...     run.predict((torch.arange(3.0),), lambda batch: 2 * batch[0])
        tensor([0., 2., 4.])
        """
        with self._pass(data, collate) as evaluation:
            over = replace(evaluation, draws=self._draws(seed))
            if not to:
                return self._inference.predict(over, function)
            self._inference.predict_to(_folder(to), over, function)
            return None

    def _draws(self, seed: int | None) -> tuple[int, ...]:
        """Return the key of the random numbers of a prediction. Every rank makes the same calls."""
        if seed is not None:
            return (_WITH_SEED, seed)
        steps = -1 if self._loop is None else self._loop.done
        last, calls = self._predictions
        self._predictions = steps, calls + 1 if steps == last else 1
        return (_BY_STEP, steps, self._predictions[1])

    @property
    def _choice(self) -> LaneChoice | None:
        return None if self._examiner is None else self._examiner.choice

    @property
    def _inference(self) -> Inference:
        """Runs all passes with these settings; run.steps(...) may take a batch size from its data."""
        if self._made is None or self._made[0] is not self.config:
            inference = Inference(self.world, self.config, self._strategy, self._choice)
            self._made = self.config, inference
        return self._made[1]

    @contextlib.contextmanager
    def _pass(self, data: Any, collate: Collate | None) -> Iterator[Pass]:
        """Return a pass over a dataset; its time does not count as training."""
        if self._loop is None:
            yield Pass(self._modules(), data, collate)
            return
        self._loop.wait_for_losses()
        begun = time.perf_counter()
        observer, after_batch = self._loop.updates.observer, self._loop.observers.evaluating()
        with self._loop.evaluating():
            note = observer.batch if observer else None
            yield Pass(self._modules(), data, collate, after_batch, note)
        self._loop.leave_out(time.perf_counter() - begun)

    def _modules(self) -> list[nn.Module]:
        tracked = self._parts.tracked.objects.values()
        return [
            *self._parts.models.values(),
            *(item for item in tracked if isinstance(item, nn.Module)),
        ]

    # Ranks

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def device(self) -> str:
        """The device of this rank."""
        return self.world.device

    def print(self, *values: object) -> None:
        """Print a line, on rank 0 only.

        - `values`: what to print, separated by spaces.

        >>> with paceline.Run(config) as run:
        ...     run.print("the device is", run.device)
        the device is cpu
        """
        if self.world.is_main:
            say(" ".join(map(str, values)))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks on the CPU, those of rank 0 first. Every rank must call this.

        - `rows`: a tensor; the number of rows may differ between ranks, their shape may not.

        >>> with paceline.Run(config) as run:
        ...     run.gather(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        return gather_in_order(self.world, rows)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor on all ranks with the values of rank 0, and return it. Every rank must call this.

        - `tensor`: a tensor of the same shape and type on every rank.

        >>> with paceline.Run(config) as run:
        ...     run.broadcast(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        if self.world.size > 1:
            broadcast_from_main([tensor])
        return tensor

    def barrier(self) -> None:
        """Wait until every rank has called this.

        >>> with paceline.Run(config) as run:
        ...     run.barrier()
        """
        wait_for_all(self.world)

    # The end

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


class _Steps(Iterator[Step]):
    """The iterator of `run.steps`."""

    def __init__(self, run: Run, batches: Iterator[RankBatch]) -> None:
        self._run, self._batches = run, batches

    def __next__(self) -> Step:
        caller = sys._getframe(1)  # noqa: SLF001 - the loop
        self._run._unusual.begin_loop(caller)  # noqa: SLF001
        self._run._look_again(caller)  # noqa: SLF001 - the variables of the loop
        return self._run._next_step(self._batches)  # noqa: SLF001 - one thing in two classes


def _check_arguments(optimizer: object, loss: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the first argument of run.update must be an optimizer, got {_kind(optimizer)}",
            fix="call run.update(optimizer, loss, step)",
        )
    if not callable(loss):
        raise ConfigError(
            f"the loss must be a function of a batch, got {_kind(loss)}",
            fix="pass a function: run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)",
        )


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _named_datasets(data: Any) -> dict[str, Any]:
    """Return datasets by the prefix of their metrics.

    >>> _named_datasets([1, 2]), _named_datasets({"val": [1], "test": [2]})
    ({'': [1, 2]}, {'val/': [1], 'test/': [2]})
    """
    if not isinstance(data, Mapping):
        return {"": data}
    if not data or any(isinstance(value, Tensor) for value in data.values()):
        raise ConfigError(
            f"run.evaluate got a dict with {', '.join(map(str, data)) or 'nothing'}; a dict names several datasets",
            fix='pass tensors as a tuple, (inputs, targets), and several datasets as {"val": a, "test": b}',
        )
    return {f"{name}/": value for name, value in data.items()}


def _folder(to: str | Path) -> Path:
    if "://" in str(to):
        raise ConfigError(
            f"run.predict writes to a folder, not to {to}", fix="pass the path of a folder in to="
        )
    return Path(to)


def show_briefly(error: BaseException | None) -> None:
    """Let Python print this error, if nobody catches it, as `paceline run` would.

    An error of Paceline has no traceback, and its own exit code; that of another has none of our frames. Set after the
    ranks have joined: torch's own hook would swallow the exit code.
    """
    if not isinstance(error, Exception):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
            return
        if isinstance(error, PacelineError):
            terminal.error(f"error: {error}")
            raise SystemExit(error.exit_code)
        print(traceback_text(error), file=sys.stderr)

    sys.excepthook = hook
