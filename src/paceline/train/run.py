"""`Run`: one training, from joining the ranks to the last checkpoint, for every loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import Batches, RankBatch
from paceline.data.reading.collate import Collate
from paceline.errors import ConfigError, TrainingError
from paceline.events import Sink
from paceline.train.lane_loss import Losses, LossFunction
from paceline.train.note import Note
from paceline.train.parallel import prepare
from paceline.train.run_evaluation import RunEvaluation
from paceline.train.run_folder import RunFolder
from paceline.train.run_loop import RunLoop
from paceline.train.run_state import Registered, SavedNames
from paceline.train.run_step import Step, refuse_unsupported, with_length, with_requests_of
from paceline.world.process_group import join
from paceline.world.randomness import seed_everything

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Run(RunEvaluation):
    """One training on any number of ranks: joins them, restores, saves, stops, and reports.

    - `config`: the settings of the run.
    - `sinks`: functions that are called with every event on rank 0; they cannot change the training.

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

    def __init__(self, config: RunConfig, *, sinks: Sequence[Sink] = ()) -> None:
        self.config = config
        self._sinks = sinks
        self._stack = contextlib.ExitStack()
        self._parts = Registered()
        self._loop: RunLoop | None = None
        self._step: Step | None = None
        self._note: Note | None = None
        self._updates = 0
        self._failed = ""

    def __enter__(self) -> Self:
        refuse_unsupported(self.config)
        self.world = self._stack.enter_context(join(self.config))
        self._folder = RunFolder(self.config, self.world, self._sinks)
        try:
            self._stack.enter_context(self._folder.opened(self._done))
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._conclude()
            except BaseException:
                self._stack.__exit__(*sys.exc_info())
                raise
        self._stack.__exit__(kind, error, trace)

    def _done(self) -> int:
        return self._loop.done if self._loop else 0

    def _conclude(self) -> None:
        """Complete a step that the loop was left in, and report the end of the run."""
        if self._loop is None:
            return
        if self._step is not None:
            self._loop.state.finished = self._loop.state.finished or "the script left the loop"
            self._complete_step()
        self._loop.conclude()

    # What belongs to the run

    def model(
        self,
        model: Model,
        *,
        name: str = "",
        saved: SavedNames | None = None,
        wrap: tuple[type[nn.Module], ...] | None = None,
    ) -> Model:
        """Move a model to this rank's device, or shard it there, with the weights of rank 0; return the same object.

        `saved(name)` tells which weights checkpoints hold, for example only those of LoRA adapters. `wrap` has the
        classes of the units of parallel=fsdp.
        """
        self._refuse_late("run.model")
        prepare(model, self.world, self.config, wrap)
        self._parts.add_model(model, name, saved)
        return model

    def optimizer(self, optimizer: Optimizer, *, name: str = "") -> Optimizer:
        """Save and restore an optimizer with the run; return the same object."""
        self._refuse_late("run.optimizer")
        self._parts.add_optimizer(optimizer, name)
        return optimizer

    def track(self, **objects: Any) -> None:
        """Save and restore objects that have `state_dict` and `load_state_dict`: schedulers, EMA, counters."""
        self._refuse_late("run.track")
        for name, item in objects.items():
            if isinstance(item, nn.Module):
                item.to(self.world.device)
            self._parts.tracked.add(name, item)

    def _refuse_late(self, call: str) -> None:
        if self._loop is not None:
            raise ConfigError(
                f"{call} was called after run.steps: the checkpoint is restored already",
                fix=f"call {call} before the loop over run.steps(...)",
            )

    # The loop

    def steps(
        self, data: Any, *, collate: Collate | None = None, epochs: int = 0, steps: int = 0
    ) -> Iterator[Step]:
        """Return the steps that are left, from the newest checkpoint on. The run saves and stops between them.

        `data`: tensors, a map-style dataset, a DataLoader or a Stream. `collate` makes the batch of each lane.
        `epochs` and `steps` replace the defaults of the config; settings on the command line come first.
        """
        if self._loop is not None:
            raise ConfigError(
                "run.steps was called twice in one run",
                fix="loop once; to read two datasets, pass torch.utils.data.StackDataset(a=one, b=other)",
            )
        if not self._parts.optimizers:
            raise ConfigError(
                "the run has no optimizer",
                fix="call run.optimizer(torch.optim.AdamW(model.parameters())) before run.steps(...)",
            )
        config = with_length(self.config, epochs, steps)
        batches = Batches(data, config, self.world, collate=collate)
        self.config = batches.config
        self._folder.write_settings(self.config)
        self._loop = RunLoop(self.world, self.config, self._folder, self._parts, batches)
        self._stack.enter_context(self._loop.running())
        return _Steps(self, self._loop.begin())

    def _next_step(self, batches: Iterator[RankBatch]) -> Step:
        """Complete the current step and begin the next; raise StopIteration after the last."""
        assert self._loop is not None
        enough = self._complete_step() if self._step is not None else False
        if enough or self._loop.is_over:
            self._loop.end()
            raise StopIteration
        batch = next(batches)
        seed_everything(self.config.seed, batch.plan.index)
        self._loop.begin_step(batch)
        self._step, self._note, self._updates = Step(batch), None, 0
        return self._step

    def _complete_step(self) -> bool:
        assert self._loop is not None
        assert self._step is not None
        batch, self._step = self._step._batch, None  # noqa: SLF001 - the run made it
        note = self._note or self._loop.agree_without_update()
        return self._loop.complete(batch, note)

    def finish(self, reason: str) -> None:
        """End the loop after this step; the run is then complete. Every rank must call this."""
        self._running().state.finished = reason or "finished by the script"

    def save(self) -> None:
        """Save a checkpoint after this step."""
        self._running().save_requested = True

    def _running(self) -> RunLoop:
        if self._loop is None:
            raise ConfigError(
                "the run has no loop yet", fix="call this inside of `for step in run.steps(...)`"
            )
        return self._loop

    # Updates

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        clip: float | None = None,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Add the gradients of all lanes of all ranks, clip them, and change the weights of one optimizer.

        `loss(batch)` is called once per lane. It returns the mean over the lane's samples, (sum, count), or a dict with
        the key "loss" and other values. With `over_batch`, it returns one row per sample, and `over_batch(rows)` is the
        loss over the rows of all samples of the step. `clip` replaces clip_norm of the config.
        """
        losses = self.backward(optimizer, loss, step, over_batch=over_batch)
        with self._poisoning():
            norm = self.config.clip_norm if clip is None else clip
            self._running().updates.apply(optimizer, norm)
        return losses

    def backward(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Leave the gradients of all lanes of all ranks in `grad`, as `update` does before it clips and steps."""
        self._check_current(step)
        loop = self._running()
        with self._poisoning():
            batch = step._batch  # noqa: SLF001 - the run made it
            number, self._updates = self._updates, self._updates + 1
            losses, note = loop.updates.backward(optimizer, loss, batch, number, over_batch)
        seed_everything(self.config.seed, batch.plan.index, -1 - number)
        note = note._replace(moves=note.moves[:0])
        self._note = note if self._note is None else with_requests_of(self._note, note)
        return losses

    def _check_current(self, step: Step) -> None:
        if self._failed:
            raise TrainingError(
                f"an earlier update of this run failed: {self._failed}",
                fix="let the error end the run; the same command resumes from the newest checkpoint",
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

    # Helpers

    def log(self, **values: Any) -> None:
        """Report numbers with this step: on the console, in events.jsonl and to the loggers."""
        self._running().logged.update({name: float(value) for name, value in values.items()})


class _Steps(Iterator[Step]):
    """The iterator of `run.steps`."""

    def __init__(self, run: Run, batches: Iterator[RankBatch]) -> None:
        self._run, self._batches = run, batches

    def __next__(self) -> Step:
        return self._run._next_step(self._batches)  # noqa: SLF001 - one thing in two classes
