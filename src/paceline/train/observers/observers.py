"""Observers of a training: heartbeat, watchdog, straggler detection, step times, profiler."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch.distributed as dist

from paceline.checkpoint.cadence import slow_disk_s
from paceline.config import RunConfig
from paceline.errors import ConfigError, Stopped
from paceline.events import Event, SlowRank
from paceline.exact.step import StepEngine
from paceline.exact.strategy import Strategy
from paceline.hang.rank_report import RankException
from paceline.hang.watchdog import Deadline, Watchdog
from paceline.launch.rank_local import end_rank, format_error, lost_peer
from paceline.rundir import RunDir
from paceline.telemetry.heartbeat import Heartbeat
from paceline.telemetry.pulse import REST_S, Pulse
from paceline.telemetry.rank_times import RankTimes
from paceline.telemetry.stragglers import StragglerWatch, describe_straggler
from paceline.telemetry.usage import UsageMeter
from paceline.train.observers.console import say
from paceline.train.observers.gpu_usage import gpu_usage
from paceline.train.observers.profiling import Profiling
from paceline.train.observers.step_times import StepTimes
from paceline.world.world import World

T = TypeVar("T")

_COMPILE_S = 120.0  # a step with a new shape is compiled when it occurs
_CAPTURE_S = 20.0


class Observers:
    """Are notified by the training loop; none of them changes the training."""

    def __init__(
        self,
        world: World,
        config: RunConfig,
        strategy: Strategy,
        optimizer_step: StepEngine,
        emit: Callable[[Event], None],
    ) -> None:
        self._world, self._config = world, config
        self._optimizer_step, self._emit = optimizer_step, emit
        self._directory = RunDir.of(config)
        beats = self._directory.beat(0).parent.absolute()
        rank_times = RankTimes(self._directory.rank_times.absolute(), world.size)
        self._stragglers = StragglerWatch(
            beats, config.batch.lanes, world.size, time.time(), rank_times.add
        )
        clock = optimizer_step.clock
        look = self._stragglers.look if world.is_main else lambda: None
        usage = UsageMeter(gpu_usage(world.device))
        self._heartbeat = Heartbeat(
            self._directory, world, clock=clock, after_beat=look, usage=usage
        )
        self._pulse = _pulse_of(config)
        self._times = StepTimes(config, world, strategy)
        self._profiling = Profiling(config, world, clock)
        self._save_s = 0.0
        self._dog: Watchdog | None = None

    @contextlib.contextmanager
    def attending(self, state_bytes: int) -> Iterator[None]:
        """Observe from before the first step until after the last save of this many bytes."""
        self._save_s = slow_disk_s(state_bytes)
        with self._heartbeat, self._watchdog():
            self._pulse.begin("starting", self._save_s)
            yield

    def _watchdog(self) -> contextlib.AbstractContextManager[object]:
        if not self._config.timeout.hang_steps:
            return contextlib.nullcontext()
        deadline = None
        if self._world.size > 1 and dist.get_backend() == "nccl":
            deadline = Deadline(self._config.timeout.step_s, end_rank)
        self._dog = Watchdog(
            self._directory, self._world, self._pulse, say, self._explain, deadline
        )
        return self._dog

    def _explain(self, error: BaseException) -> RankException | None:
        """Return what went wrong, for the hang report; None for a run that was asked to stop, or refused."""
        refused = isinstance(error, ConfigError) and self._pulse.doing == "starting"
        if refused or isinstance(error, Stopped) or not isinstance(error, Exception):
            return None
        return RankException(type(error).__name__, format_error(error), lost_peer(error))

    def reading(self, steps: Iterable[T]) -> Iterable[T]:
        """Pass steps on; the time spent waiting for each counts as reading."""
        return self._heartbeat.reading(self._pulse.reading(self._times.reading(steps)))

    def unusual(self, what: str) -> None:
        """Note what the script does now and did not do in the step before."""
        self._pulse.unusual = what
        if self._dog is not None and self._world.size > 1:
            self._dog.report_unusual()

    def step_taken(self, samples: int) -> None:
        """Note that the weights were updated."""
        self._times.step_done(samples, self._optimizer_step.ready)

    def evaluating(self) -> Callable[[], None]:
        """Note that an evaluation begins; return a function to call after each batch of it."""
        self._pulse.begin("evaluating")
        return self._pulse.sign

    def hold(self, doing: str) -> contextlib.ExitStack:
        """Let a debugger hold the run: no hang, and not this rank's own time."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._optimizer_step.clock.waiting())
            stack.enter_context(self._pulse.hold(doing))
            return stack.pop_all()

    def step_done(self, done: int) -> None:
        """Note that a step is complete, including reports and evaluation; a save may follow."""
        self._heartbeat.step_done(done, self._optimizer_step.ready)
        self._pulse.step_done(done)
        self._report_slow_rank(done)
        self._pulse.begin("saving", self._save_s)

    def seen_enough(self) -> bool:
        """Return whether the profiled steps are over. Every rank must call this after every step."""
        return self._profiling.after_step()

    def ending(self) -> None:
        """Note that no step follows, only the last save."""
        self._times.write()
        self.concluding()

    def concluding(self) -> None:
        """Note that the last save is complete."""
        self._pulse.begin("ending", self._save_s)

    def _report_slow_rank(self, done: int) -> None:
        if (news := self._stragglers.news()) is None:
            return
        slow, before = news
        if slow is not None:
            rank, node = slow.beat.rank, slow.beat.node
            facts = rank, node, slow.phase, slow.kind, slow.more_s, slow.times
            self._emit(SlowRank(slow.step or done, *facts, describe_straggler(slow)))
        elif before is not None and before.kind == "chronic":
            rank, node = before.beat.rank, before.beat.node
            sentence = f"rank {rank} ({node}) is no longer slow"
            self._emit(SlowRank(done, rank, node, before.phase, "over", 0.0, 1.0, sentence))


def _pulse_of(config: RunConfig) -> Pulse:
    rest_s = REST_S
    if config.compile:
        rest_s = _COMPILE_S
    elif config.capture != "false":
        rest_s = _CAPTURE_S
    return Pulse(config.timeout.hang_steps, rest_s)
