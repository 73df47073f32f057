"""The training loop: runs steps until all samples are seen; reports, evaluates, saves and stops."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.config.values import to_toml
from paceline.data.reading.batches import Batches, RankBatch
from paceline.errors import Stopped
from paceline.events import (
    EpochDone,
    Evaluated,
    Event,
    EventLog,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    Sink,
    StepDone,
)
from paceline.rundir import RunDir, make_private, write_whole, writing_to
from paceline.runlock import Claim, claimed
from paceline.scale.lr import scaled_lr
from paceline.train.checkpointing import Checkpoints
from paceline.train.console import Console, describe_run, rank_line, say
from paceline.train.cuda_graph import step_class
from paceline.train.environment import environment_facts
from paceline.train.evaluate import Evaluation, Metric, check_evaluation
from paceline.train.loggers import Loggers, check_packages
from paceline.train.meter import Meter
from paceline.train.note import Note, RankRequests
from paceline.train.observers import Observers
from paceline.train.optimizer_step import LossFunction
from paceline.train.recorder import Recorder
from paceline.train.state import digests_of_all, state_digest
from paceline.train.stopping import Stopping
from paceline.train.training_state import TrainingState
from paceline.world.device import peak_of_all
from paceline.world.process_group import shorten_timeout
from paceline.world.world import World


@dataclass(frozen=True)
class _Recovery:
    """Saves and stops the run at the same step on all ranks."""

    checkpoints: Checkpoints
    stopping: Stopping

    def requests(self) -> RankRequests:
        """Return whether this rank asks to save or to stop after the current step."""
        is_due = self.checkpoints.is_due()
        self.stopping.request.saving = self.checkpoints.is_saving
        return RankRequests(save=is_due, stop=self.stopping.request.asked)

    def after_step(self, note: Note, done: int, metrics: Mapping[str, float]) -> bool:
        """Save if that is due; return whether all ranks stop here. Every rank must call this."""
        self.checkpoints.update()
        agreed = self.stopping.agree(note)
        self.checkpoints.after_step(done, metrics, requested=agreed.save or agreed.stop)
        return agreed.stop


class Trainer:
    """Trains a model on batches and emits events. Every rank makes one and calls `run`."""

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
        flops_per_sample: float = 0.0,
    ) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        self.batches, self.config = batches, config
        self.directory = RunDir.of(config)
        check_packages(config)
        self._sinks = list(sinks)
        check_evaluation(config, given=evaluation is not None)
        peak = peak_of_all(world, config.precision) if flops_per_sample else 0.0
        self._mfu_per_rate = flops_per_sample / peak if peak else 0.0
        self._evaluation: Evaluation | None = None
        if evaluation is not None:
            self._evaluation = Evaluation(evaluation, loss, metrics or {}, config, world)
        make_optimizer_step = step_class(world, optimizer, config)
        self._optimizer_step = make_optimizer_step(
            world, model, optimizer, loss, config, batches.total_samples
        )
        self._since_report, self._in_epoch = Meter(), Meter()
        self._observers = Observers(world, config, self._optimizer_step, self._emit)
        self._last_note = Note(0.0, 0.0)
        self._metrics: Mapping[str, float] = {}
        self._done = 0
        self._claim: Claim | None = None

    def run(self) -> None:
        """Train until all steps are done, from the newest intact checkpoint. Raises `Stopped` if asked to stop."""
        recorder = Recorder(self.config, self.world)
        state = self._state()
        with (
            self._opened(),
            self._recovery(state) as recovery,
            self._observers.attending(state.size_bytes),
        ):
            self._done = recovery.checkpoints.restore()
            self._announce()
            recorder.start(self.model, self.optimizer, self._optimizer_step.own_state())
            self._train(recovery, recorder)
            self._observers.ending()
            if not self.config.only_measures:
                recovery.checkpoints.save(self._done, self._metrics)
            recovery.checkpoints.finish()
            self._observers.concluding()
            own = digests_of_all(self.world, self._optimizer_step.own_state())
            digest = state_digest(self.model, self.optimizer, own)
            self._emit(RunEnded(self._done, self._in_epoch.run_seconds, digest))

    def _train(self, recovery: _Recovery, recorder: Recorder) -> None:
        first, total_steps = self._done, self.batches.total_steps
        for step in self._observers.reading(self.batches.steps(first)):
            self._train_step(step, recovery)
            self._observers.step_done(self._done)
            if step.plan.index == first:
                shorten_timeout(self.world, self.config)
            stops = recovery.after_step(self._last_note, self._done, self._metrics)
            if stops and self._done < total_steps:
                self._stop(recovery)
            if self._record(recorder, step) or self._observers.seen_enough():
                break

    def _train_step(self, step: RankBatch, recovery: _Recovery) -> None:
        note = self._last_note = self._optimizer_step(step, recovery.requests)
        self._observers.step_taken(step.plan.samples)
        self._done = done = step.plan.index + 1
        self._metrics = {}
        self._since_report.add(note, step.plan.samples)
        self._in_epoch.add(note, step.plan.samples)
        if done % self.config.log.every_steps == 0:
            self._report(step)
        if done % self.batches.plan.steps_per_epoch == 0 or done == self.batches.total_steps:
            self._end_epoch(step)
        elif self._evaluation and self._evaluates_after(done):
            self._evaluate_between(self._evaluation)

    def _evaluates_after(self, done: int) -> bool:
        """Return whether to evaluate within an epoch; with local SGD only after a synchronization."""
        every = self.config.evaluate_steps
        if not every or done % every:
            return False
        return self._optimizer_step.synchronized or not self.config.local_sgd.steps

    def _evaluate_between(self, evaluation: Evaluation) -> None:
        meters = self._since_report, self._in_epoch
        for meter in meters:
            meter.settle()  # otherwise the time of steps still running on the GPU is left out, too
        begun = time.perf_counter()
        self._metrics = evaluation.run(self.model, self._observers.evaluating())
        self._emit(Evaluated(self._done, self._metrics))
        for meter in meters:
            meter.leave_out(time.perf_counter() - begun)

    def _report(self, step: RankBatch) -> None:
        loss, speed = self._since_report.close(self._optimizer_step)
        mfu, lr = speed * self._mfu_per_rate, self._optimizer_step.rate
        epoch, samples = step.plan.epoch + 1, step.plan.seen
        self._emit(StepDone(self._done, epoch, samples, loss, lr, speed, mfu))

    def _end_epoch(self, step: RankBatch) -> None:
        loss, speed = self._in_epoch.close(self._optimizer_step)
        epoch = step.plan.epoch + 1
        if self._evaluation:
            self._metrics = self._evaluation.run(self.model, self._observers.evaluating())
        epochs = -(-self.batches.total_steps // self.batches.plan.steps_per_epoch)
        self._emit(EpochDone(epoch, epochs, self._done, loss, speed, self._metrics))
        if self.config.log.ranks == "all":
            say(rank_line(self.world, epoch, len(step.lanes[0].batch[0]), self._steps_in(epoch)))
        self._in_epoch.restart()
        self._since_report.restart()

    def _steps_in(self, epoch: int) -> int:
        return self._done - (epoch - 1) * self.batches.plan.steps_per_epoch

    def _record(self, recorder: Recorder, step: RankBatch) -> bool:
        """Record the step for `paceline verify`; return whether it has enough steps."""
        if not recorder.active:
            return False
        total = self._optimizer_step.total(Note(self._last_note.loss, self._last_note.counted))
        batches = [lane.batch for lane in step.lanes if lane.samples]
        loss, own = float(total.loss) / total.counted, self._optimizer_step.own_state()
        return recorder.step(self._done, loss, self.model, self.optimizer, batches, own)

    def _stop(self, recovery: _Recovery) -> None:
        """Leave in order to be resumed; every rank does so after the same, saved step."""
        recovery.checkpoints.finish(in_time=True)
        reason = recovery.stopping.request.reason or "another rank was asked to stop"
        self._emit(RunStopped(self._done, reason))
        raise Stopped(self._done)

    def _state(self) -> TrainingState:
        return TrainingState(
            self.world,
            self.config,
            self.model,
            self.optimizer,
            self.batches,
            self._optimizer_step,
            {"since_report": self._since_report, "in_epoch": self._in_epoch},
        )

    @contextlib.contextmanager
    def _recovery(self, state: TrainingState) -> Iterator[_Recovery]:
        """Treat signals as requests to save and stop."""
        stopping = Stopping(self.world, self.config, self._optimizer_step, state.size_bytes)
        on_saved = stopping.request.learn_save
        checkpoints = Checkpoints(state, self._emit, self._claim, on_saved)
        with stopping.listening(), checkpoints:
            yield _Recovery(checkpoints, stopping)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Open the run folder on rank 0, and log the error if the run fails."""
        if not self.world.is_main:
            yield
            return
        with writing_to(self.directory.root):
            make_private(self.directory.root)
        with (
            claimed(self.directory.lock, self.world.incarnation) as self._claim,
            EventLog(self.directory.events) as log,
            Loggers(self.config, self.world, self.directory) as loggers,
        ):
            write_whole(self.directory.config, to_toml(self.config).encode())
            write_whole(self.directory.environment, environment_facts(self.world.device).encode())
            self._sinks += [log, Console(self.config), loggers]
            try:
                yield
            except Stopped:
                raise
            except BaseException as error:
                self._claim.check()  # if another process has taken the run over, it has not failed
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
                scaled_lr(self.config), self.batches.total_steps, describe_run(self.config, world, self.batches), self._done,
            )
        )  # fmt: skip
