"""The training loop: step after step, until the samples are seen. Short enough to copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
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
from paceline.train.console import Console, describe_run, rank_line, say
from paceline.train.cuda_graph import make_step
from paceline.train.environment import environment_facts
from paceline.train.evaluate import Evaluation, Metric, check_evaluation
from paceline.train.lane_sum import Note
from paceline.train.lifeline import Lifeline
from paceline.train.loggers import Loggers, check_packages
from paceline.train.meter import Meter
from paceline.train.observers import Observers
from paceline.train.optimizer_step import LossFunction
from paceline.train.recorder import Recorder
from paceline.train.state import digests_of_all, state_digest
from paceline.world.device import peak_of_all
from paceline.world.process_group import shorten_timeout
from paceline.world.world import World


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
        flops_per_sample: float = 0.0,
    ) -> None:
        self.world, self.model, self.optimizer, self.batches, self.config = (
            world,
            model,
            optimizer,
            batches,
            config,
        )
        self.directory = RunDir.of(config)
        check_packages(config)
        self._sinks = list(sinks)
        check_evaluation(config, given=evaluation is not None)
        peak = peak_of_all(world, config.precision) if flops_per_sample else 0.0
        self._share_per_rate = flops_per_sample / peak if peak else 0.0
        self._evaluation = (
            None
            if evaluation is None
            else Evaluation(evaluation, loss, metrics or {}, config, world)
        )
        self._take = make_step(world, model, optimizer, loss, config, batches.total_samples)
        self._since_report, self._in_epoch = Meter(), Meter()
        self._onlookers = Observers(world, config, self._take, self._emit)
        self._last = Note(0.0, 0.0)
        self._metrics: Mapping[str, float] = {}
        self._done = 0
        self._claim: Claim | None = None

    def run(self) -> None:
        """Train until all steps are done, from the newest good checkpoint on. Raises `Stopped` if told to stop."""
        recorder = Recorder(self.config, self.world)
        with self._opened(), self._lifeline() as life, self._onlookers.attending(life.size_bytes):
            self._done = first = life.restore()
            self._announce()
            recorder.start(self.model, self.optimizer, self._take.own_state())
            for step in self._onlookers.reading(self.batches.steps(first)):
                self._train(step, life)
                self._onlookers.step_done(self._done)
                if step.plan.index == first:
                    shorten_timeout(self.world, self.config)
                if (
                    life.after_step(self._last, self._done, self._metrics)
                    and self._done < self.batches.total_steps
                ):
                    self._stop(life)
                if self._wants(recorder, step) or self._onlookers.seen_enough():
                    break
            self._onlookers.ending()
            if not self.config.only_looked_at:
                life.save(self._done, self._metrics)
            life.finish()
            self._onlookers.concluding()
            own = digests_of_all(self.world, self._take.own_state())
            digest = state_digest(self.model, self.optimizer, own)
            self._emit(RunEnded(self._done, self._in_epoch.run_seconds, digest))

    def _train(self, step: RankBatch, life: Lifeline) -> None:
        note = self._last = life.take(step)
        self._onlookers.step_taken(step.plan.samples)
        self._done = done = step.plan.index + 1
        self._metrics = {}
        self._since_report.add(note, step.plan.samples)
        self._in_epoch.add(note, step.plan.samples)
        if done % self.config.log.every_steps == 0:
            self._report(step)
        if done % self.batches.plan.steps_per_epoch == 0 or done == self.batches.total_steps:
            self._end_epoch(step)
        elif self._evaluation and self._is_due(done):
            self._evaluate_between(self._evaluation)

    def _is_due(self, done: int) -> bool:
        """Return whether to evaluate after so many steps; of replicas that walk apart, the common weights are new when they met."""
        every = self.config.evaluate_steps
        return (
            every > 0 and done % every == 0 and (self._take.met or not self.config.local_sgd.steps)
        )

    def _evaluate_between(self, evaluation: Evaluation) -> None:
        meters = self._since_report, self._in_epoch
        for meter in meters:
            meter.settle()  # or steps that the device has yet to do would be left out as well
        begun = time.perf_counter()
        self._metrics = evaluation.run(self.model, self._onlookers.evaluating())
        self._emit(Evaluated(self._done, self._metrics))
        for meter in meters:
            meter.leave_out(time.perf_counter() - begun)

    def _report(self, step: RankBatch) -> None:
        loss, rate = self._since_report.close(self._take)
        mfu = rate * self._share_per_rate
        self._emit(
            StepDone(
                self._done, step.plan.epoch + 1, step.plan.seen, loss, self._take.rate, rate, mfu
            )
        )

    def _end_epoch(self, step: RankBatch) -> None:
        loss, rate = self._in_epoch.close(self._take)
        epoch = step.plan.epoch + 1
        if self._evaluation:
            self._metrics = self._evaluation.run(self.model, self._onlookers.evaluating())
        epochs = -(-self.batches.total_steps // self.batches.plan.steps_per_epoch)
        self._emit(EpochDone(epoch, epochs, self._done, loss, rate, self._metrics))
        if self.config.log.ranks == "all":
            say(rank_line(self.world, epoch, len(step.lanes[0].batch[0]), self._steps_in(epoch)))
        self._in_epoch.restart()
        self._since_report.restart()

    def _steps_in(self, epoch: int) -> int:
        return self._done - (epoch - 1) * self.batches.plan.steps_per_epoch

    def _wants(self, recorder: Recorder, step: RankBatch) -> bool:
        """Let verify record the step; true when it has seen enough."""
        if not recorder.active:
            return False
        total = self._take.total(Note(self._last.loss, self._last.counted))
        batches = [lane.batch for lane in step.lanes if lane.samples]
        loss, own = float(total.loss) / total.counted, self._take.own_state()
        return recorder.step(self._done, loss, self.model, self.optimizer, batches, own)

    def _stop(self, life: Lifeline) -> None:
        """Leave, to be resumed: every rank comes here after the same step, and it is saved."""
        life.finish(in_time=True)
        self._emit(RunStopped(self._done, life.request.reason or "another rank was told to stop"))
        raise Stopped(self._done)

    @contextlib.contextmanager
    def _lifeline(self) -> Iterator[Lifeline]:
        """Keep the run alive: signals ask it to save and stop."""
        meters = {"since_report": self._since_report, "in_epoch": self._in_epoch}
        life = Lifeline(
            self.world,
            self.model,
            self.optimizer,
            self.batches,
            self.config,
            self._take,
            meters,
            self._emit,
            self._claim,
        )
        with life.listening():
            yield life

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Open the run folder on rank 0, and leave a word in it if the run breaks off."""
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
                self._claim.check()  # what another process goes on with is not ours to call failed
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
