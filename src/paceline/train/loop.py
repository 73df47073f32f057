"""The training loop: step after step, until the samples are seen. Short enough to copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.save import save_checkpoint
from paceline.config import RunConfig
from paceline.config.values import to_toml
from paceline.data.batches import Batches, Step
from paceline.events import CheckpointSaved, EpochDone, Event, EventLog, RunEnded, RunFailed, RunStarted, Sink, StepDone
from paceline.rundir import RunDir, make_private, write_whole, writing_to
from paceline.scale.lr import scaled_lr
from paceline.train.console import Console, describe_run, rank_line, say
from paceline.train.evaluate import Evaluation, Metric
from paceline.train.meter import Meter
from paceline.train.record import Recorder
from paceline.train.reduction import Note
from paceline.train.state import named_state, state_digest
from paceline.train.step import LossFunction, OptimizerStep
from paceline.world.facts import World
from paceline.world.group import shorten_timeout


class Trainer:
    """Trains a model on batches, and says what happens. Every rank makes one and calls `run`."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        loss: LossFunction,
        config: RunConfig,
        *,
        evaluation: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.world, self.model, self.optimizer, self.batches, self.config = world, model, optimizer, batches, config
        self.directory = RunDir(Path(config.runs) / config.name)
        self._sinks = list(sinks)
        self._evaluation = None if evaluation is None else Evaluation(evaluation, loss, metrics or {}, config, world)
        self._take = OptimizerStep(world, model, optimizer, loss, config, batches.total_samples)
        self._since_report, self._in_epoch = Meter(), Meter()
        self._last = Note(0.0, 0.0)
        self._done = 0

    def run(self) -> None:
        """Train until all steps are done."""
        recorder = Recorder(self.config, self.world)
        with self._opened():
            self._announce()
            recorder.start(self.model, self.optimizer)
            for step in self.batches.steps():
                self._train(step)
                if self._wants(recorder, step):
                    break
            self._save()
            self._emit(RunEnded(self._done, self._in_epoch.run_seconds, state_digest(self.model, self.optimizer)))

    def _train(self, step: Step) -> None:
        note = self._last = self._take(step)
        self._done = done = step.plan.step + 1
        self._since_report.add(note, step.plan.samples)
        self._in_epoch.add(note, step.plan.samples)
        if done == 1:
            shorten_timeout(self.world, self.config)
        if done % self.config.log.every_steps == 0:
            self._report(step)
        if done % self.batches.plan.steps_per_epoch == 0 or done == self.batches.total_steps:
            self._end_epoch(step)

    def _report(self, step: Step) -> None:
        loss, rate = self._since_report.close(self._take)
        self._emit(StepDone(self._done, step.plan.epoch + 1, step.plan.seen, loss, self._take.rate, rate))

    def _end_epoch(self, step: Step) -> None:
        loss, rate = self._in_epoch.close(self._take)
        epoch = step.plan.epoch + 1
        metrics = self._evaluation.run(self.model) if self._evaluation else {}
        epochs = -(-self.batches.total_steps // self.batches.plan.steps_per_epoch)
        self._emit(EpochDone(epoch, epochs, self._done, loss, rate, metrics))
        if self.config.log.ranks == "all":
            say(rank_line(self.world, epoch, len(step.lanes[0].batch[0]), self._steps_in(epoch)))
        if (
            self.config.checkpoint.every_epochs
            and epoch % self.config.checkpoint.every_epochs == 0
            and self._done < self.batches.total_steps
        ):
            self._save()
        self._in_epoch.restart()
        self._since_report.restart()

    def _steps_in(self, epoch: int) -> int:
        return self._done - (epoch - 1) * self.batches.plan.steps_per_epoch

    def _wants(self, recorder: Recorder, step: Step) -> bool:
        """Let verify record the step; true when it has seen enough."""
        if not recorder.active:
            return False
        total = self._take.total(Note(self._last.loss, self._last.counted))
        batches = [lane.batch for lane in step.lanes if lane.samples]
        return recorder.step(self._done, total.loss / total.counted, self.model, self.optimizer, batches)

    def _save(self) -> None:
        if self.world.is_main:
            tensors = dict(named_state(self.model, self.optimizer))
            folder = self.directory.checkpoint(self._done)
            size = save_checkpoint(folder, tensors, step=self._done, samples=self.batches.plan.seen_after(self._done))
            self._emit(CheckpointSaved(self._done, str(folder), size))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Open the run folder on rank 0, and leave a word in it if the run breaks off."""
        if not self.world.is_main:
            yield
            return
        with writing_to(self.directory.root):
            make_private(self.directory.root)
            write_whole(self.directory.config, to_toml(self.config).encode())
        with EventLog(self.directory.events) as log:
            self._sinks += [log, Console(self.config)]
            try:
                yield
            except BaseException as error:
                log(RunFailed(self._done, self.world.rank, f"{type(error).__name__}: {error}"))
                raise

    def _emit(self, event: Event) -> None:
        if self.world.is_main:
            for sink in self._sinks:
                sink(event)

    def _announce(self) -> None:
        batch, world, plan = self.config.batch, self.world, self.batches.plan
        self._emit(
            RunStarted(
                world.size, world.device, world.launcher, plan.samples, batch.global_size, batch.lanes,
                scaled_lr(self.config), self.batches.total_steps, describe_run(self.config, world, self.batches),
            )
        )  # fmt: skip
