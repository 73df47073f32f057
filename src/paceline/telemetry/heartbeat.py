"""Progress and speed of this rank: a small file that it replaces every few seconds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.rundir import RunDir, make_private
from paceline.safe_open import open_to_write, parse_json
from paceline.telemetry.phases import PHASES, PhaseClock, PhaseTime, Window, summary
from paceline.telemetry.usage import USAGE, UsageMeter
from paceline.world.world import World

T = TypeVar("T")

_EVERY_S = 2.0
_RANKS_PER_S = 32  # beats per second of a large world: a shared file system has other work
_JOIN_S = 1.0
_WARM_UP_STEPS = 2
NO_TIME = PhaseTime(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Beat:
    """Progress and speed of a rank."""

    rank: int
    node: str
    """The host name."""
    step: int
    """Completed steps."""
    time_s: float
    """When this rank finished its own part of the last step, by the clock of its node."""
    own_s: float
    """Mean seconds per recent step of its own work in all phases, without waiting for other ranks. Host time: on a GPU
    it includes the wait for the loss of each lane; with exact=false on a GPU, also the wait for the step before."""
    data_s: float
    """The part of `own_s` spent waiting for samples."""
    ready_s: float = 0.0
    """Mean seconds from requesting the samples until the first gradients are ready to send."""
    steps: int = 0
    """Number of steps in these means."""
    phases: Mapping[str, PhaseTime] = field(default_factory=dict)
    """Time per phase, including the wait for other ranks."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Memory and processors in use."""

    @classmethod
    def parse(cls, text: str) -> Beat:
        """Return the beat in a line of JSON; raise ValueError, TypeError or KeyError if it is damaged."""
        facts: dict[str, Any] = dict(parse_json(text))
        phases = {}
        for name, times in dict(facts.get("phases", {})).items():
            phases[str(name)] = _parse_phase(times)
        return cls(
            rank=int(facts["rank"]),
            node=str(facts["node"]),
            step=int(facts["step"]),
            time_s=float(facts["time_s"]),
            own_s=float(facts.get("own_s", 0.0)),
            data_s=float(facts.get("data_s", 0.0)),
            ready_s=float(facts.get("ready_s", 0.0)),
            steps=int(facts.get("steps", 0)),
            phases=phases,
            usage=_parse_usage(dict(facts.get("usage", {}))),
        )


def _parse_usage(values: Mapping[str, Any]) -> dict[str, float]:
    usage = {name: float(values[name]) for name in USAGE if name in values}
    return {name: value for name, value in usage.items() if 0 <= value < math.inf}


def _parse_phase(times: Mapping[str, Any]) -> PhaseTime:
    return PhaseTime(
        float(times["mean_s"]),
        float(times["steady_s"]),
        float(times["largest_s"]),
        int(times["largest_step"]),
    )


@dataclass
class _Moments:
    """Moments of the current step, by `time.perf_counter`."""

    asked: float = 0.0
    got: float = 0.0
    ready: float = 0.0


class _RecentSteps:
    """Times of the last one to two windows of steps: a single beat would decide too little."""

    def __init__(self) -> None:
        self._before, self._now = Window(), Window()
        self._warm_up = _WARM_UP_STEPS

    def add(self, step: int, spent: Mapping[str, float]) -> None:
        if self._warm_up:  # set-up work of the first steps is not typical
            self._warm_up -= 1
        else:
            self._now.add(step, spent)

    def summarize(self) -> tuple[int, dict[str, PhaseTime]]:
        """Return the number of steps and their times per phase; start a new window when one is full."""
        steps = self._now.steps + self._before.steps
        phases = summary([self._before, self._now]) if steps else {}
        if self._now.full:
            self._before, self._now = self._now, Window()
        return steps, phases


class _Writer:
    """Writes the newest beat from a thread: a slow or full disk neither delays a step nor fails the training."""

    def __init__(
        self, path: Path, first: Beat, after_beat: Callable[[], None], usage: UsageMeter
    ) -> None:
        self._path, self._usage = path, usage
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._after_beat = after_beat
        self._newest, self._changed, self._over = first, threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def submit(self, beat: Beat) -> None:
        self._newest = beat
        self._changed.set()

    def close(self) -> None:
        """Write the newest beat and stop, without waiting longer than a moment."""
        self._over = True
        self._changed.set()
        self.thread.join(_JOIN_S)

    def _run(self) -> None:
        over = False
        while not over:
            self._changed.wait()
            self._changed.clear()
            over = self._over  # read before the newest beat, so that the last one is not missed
            beat = replace(self._newest, usage=self._usage.sample())
            write_beat(self._path, self._partial, beat)
            self._after_beat()


class Heartbeat:
    """Measures the steps of this rank and writes a beat every few seconds."""

    def __init__(
        self,
        directory: RunDir,
        world: World,
        every_s: float = _EVERY_S,
        clock: PhaseClock | None = None,
        after_beat: Callable[[], None] = lambda: None,
        usage: UsageMeter | None = None,
    ) -> None:
        self._rank, self._node = world.rank, socket.gethostname()
        self._every_s = max(every_s, world.size / _RANKS_PER_S)
        self._due = time.perf_counter() + self._every_s
        self._clock = clock or PhaseClock()
        self._step, self._moments, self._recent = 0, _Moments(), _RecentSteps()
        self._exits = contextlib.ExitStack()
        path = directory.beat(world.rank).absolute()
        nothing = Beat(self._rank, self._node, 0, 0.0, 0.0, 0.0)
        self._writer = _Writer(path, nothing, after_beat, usage or UsageMeter())

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield steps, and measure the wait for each."""
        self._clock.enter("data")
        asked = time.perf_counter()
        for step in steps:
            self._clock.enter("other")
            self._moments.asked, self._moments.got = asked, time.perf_counter()
            yield step
            self._clock.enter("data")
            asked = time.perf_counter()

    def step_done(self, step: int, ready: float) -> None:
        """Add a step; `ready` is the moment, by `time.perf_counter`, at which this rank finished its own part."""
        spent = self._clock.take(self._moments.asked, self._moments.got, ready)
        self._step, self._moments.ready = step, ready
        self._recent.add(step, spent)
        if ready >= self._due:
            self._due = ready + self._every_s
            self._beat()

    def _beat(self) -> None:
        time_s = time.time() - (time.perf_counter() - self._moments.ready)
        steps, phases = self._recent.summarize()
        ready = phases.pop("ready", NO_TIME)
        beat = Beat(
            rank=self._rank,
            node=self._node,
            step=self._step,
            time_s=time_s,
            own_s=sum(phases.get(phase, NO_TIME).mean_s for phase in PHASES),
            data_s=phases.get("data", NO_TIME).mean_s,
            ready_s=ready.mean_s,
            steps=steps,
            phases=phases,
        )
        self._writer.submit(beat)

    def __enter__(self) -> Self:
        self._exits.enter_context(self._clock.measuring_gc())
        self._writer.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()
        if self._step:
            self._beat()
        self._writer.close()


def write_beat(path: Path, partial: Path, beat: Beat) -> None:
    """Replace a beat file atomically.

    It need not survive a power cut, so the disk is not awaited; errors are ignored.
    """
    if not beat.step:
        return
    with contextlib.suppress(OSError):
        make_private(path.parent)
        try:
            descriptor = open_to_write(partial, os.O_WRONLY | os.O_TRUNC)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(asdict(beat))}\n")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
