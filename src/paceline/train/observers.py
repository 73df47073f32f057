"""Those who look on while a training runs: its heartbeat, the watchdog, who is slow, the times of steps, a profile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from paceline.config import RunConfig
from paceline.events import Event, SlowRank
from paceline.rundir import RunDir
from paceline.telemetry.heartbeat import Heartbeat
from paceline.telemetry.rank_times import RankTimes
from paceline.telemetry.stragglers import StragglerWatch, describe_straggler
from paceline.train.optimizer_step import OptimizerStep
from paceline.train.profiling import Profiling
from paceline.train.step_times import StepTimes
from paceline.train.watched import disk_s, pulse_of, watchdog_of
from paceline.world.world import World

T = TypeVar("T")


class Observers:
    """Hear from the loop what happens when; none of them changes what is trained."""

    def __init__(
        self, world: World, config: RunConfig, take: OptimizerStep, emit: Callable[[Event], None]
    ) -> None:
        self._world, self._config, self._take, self._emit = world, config, take, emit
        self._directory = RunDir.of(config)
        beats = self._directory.beat(0).parent.absolute()
        kept = RankTimes(self._directory.rank_times.absolute(), world.size)
        self._slow = StragglerWatch(beats, config.batch.lanes, world.size, time.time(), kept.add)
        look = self._slow.look if world.is_main and world.size > 1 else lambda: None
        self._heart = Heartbeat(self._directory, world, clock=take.clock, after_beat=look)
        self._pulse = pulse_of(config)
        self._times = StepTimes(config, world)
        self._profiling = Profiling(config, world, take.clock)
        self._saving_s = 0.0

    @contextlib.contextmanager
    def attending(self, state_bytes: int) -> Iterator[None]:
        """Look on, from before the first step until after the last save of so much state."""
        self._saving_s = disk_s(state_bytes)
        with self._heart, watchdog_of(self._directory, self._world, self._config, self._pulse):
            self._pulse.begin("starting", self._saving_s)
            yield

    def reading(self, steps: Iterable[T]) -> Iterable[T]:
        """Pass on steps; what each is waited for is reading."""
        return self._heart.reading(self._pulse.reading(self._times.reading(steps)))

    def step_taken(self, samples: int) -> None:
        """Hear that the weights are new."""
        self._times.step_done(samples, self._take.ready)

    def evaluating(self) -> Callable[[], None]:
        """Hear that an evaluation begins; return what is to be called after each part of it."""
        self._pulse.begin("evaluating")
        return self._pulse.sign

    def step_done(self, done: int) -> None:
        """Hear that all is done that belongs to a step; a save may follow."""
        self._heart.step_done(done, self._take.ready)
        self._pulse.step_done(done)
        self._tell_slow_rank(done)
        self._pulse.begin("saving", self._saving_s)

    def seen_enough(self) -> bool:
        """Return whether the window of steps is over that a profile asked for. Every rank must call this after every step."""
        return self._profiling.after_step()

    def ending(self) -> None:
        """Hear that no step follows: the last save does."""
        self._times.write()
        self.concluding()

    def concluding(self) -> None:
        """Hear that the last save is done."""
        self._pulse.begin("ending", self._saving_s)

    def _tell_slow_rank(self, done: int) -> None:
        if (news := self._slow.news()) is None:
            return
        found, before = news
        if found is not None:
            facts = (
                found.beat.rank,
                found.beat.node,
                found.phase,
                found.kind,
                found.more_s,
                found.times,
            )
            self._emit(SlowRank(found.step or done, *facts, describe_straggler(found)))
        elif before is not None and before.kind == "chronic":
            words = f"rank {before.beat.rank} on {before.beat.node} no longer holds the others up"
            self._emit(
                SlowRank(
                    done, before.beat.rank, before.beat.node, before.phase, "over", 0.0, 1.0, words
                )
            )
