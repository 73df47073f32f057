"""Where this rank is right now: a small file that it replaces every few seconds."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.rundir import RunDir, make_private
from paceline.telemetry.phases import PHASES, PhaseClock, PhaseTime, Window, summary
from paceline.world.world import World

T = TypeVar("T")

_EVERY_S = 2.0
_RANKS_PER_S = 32  # beats a second of a large world: a shared file system has other work
_LEAVES_WITHIN_S = 1.0
_FIRST_STEPS = 2
NO_TIME = PhaseTime(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    node: str
    """The host name."""
    step: int
    """Steps that are done."""
    time_s: float
    """When this rank had done its own part of the last of them, by the clock of its node."""
    own_s: float
    """Mean seconds a step, of late, of its own work in all phases, without its waiting for others. Host time: on a GPU
    the loss of each lane is waited for, and that is in it. With exact=false on a GPU, so is the wait for the step before."""
    data_s: float
    """Of that, the wait for the samples."""
    ready_s: float = 0.0
    """Mean seconds from asking for its samples until the first gradients are ready to be sent."""
    steps: int = 0
    """How many steps these times are of."""
    phases: Mapping[str, PhaseTime] = field(default_factory=dict)
    """What each phase took, and the waiting."""

    @classmethod
    def parse(cls, text: str) -> Beat:
        """Return the beat that was written as such a line; ValueError, TypeError or KeyError if there is none."""
        found: dict[str, Any] = dict(json.loads(text))
        times = {name: float(found.get(name, 0.0)) for name in ("own_s", "data_s", "ready_s")}
        phases = {
            str(name): PhaseTime(
                float(one["mean_s"]),
                float(one["steady_s"]),
                float(one["largest_s"]),
                int(one["largest_step"]),
            )
            for name, one in dict(found.get("phases", {})).items()
        }
        return cls(
            int(found["rank"]),
            str(found["node"]),
            int(found["step"]),
            float(found["time_s"]),
            steps=int(found.get("steps", 0)),
            phases=phases,
            **times,
        )


class Heartbeat:
    """Writes a rank's beats from a thread: a slow or full disk holds no step up, and fails no training."""

    def __init__(
        self,
        directory: RunDir,
        world: World,
        every_s: float = _EVERY_S,
        clock: PhaseClock | None = None,
        after_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = directory.beat(world.rank).absolute()
        self._partial = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        self._rank, self._node = world.rank, socket.gethostname()
        self._every_s = max(every_s, world.size / _RANKS_PER_S)
        self._due = time.perf_counter() + self._every_s
        self._step, self._asked, self._got, self._ready = 0, 0.0, 0.0, 0.0
        self._clock, self._after_beat = clock or PhaseClock(), after_beat
        self._before, self._now = Window(), Window()
        self._left_out = _FIRST_STEPS
        self._leaving = contextlib.ExitStack()
        self._last = Beat(self._rank, self._node, 0, 0.0, 0.0, 0.0)
        self._news, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._write_news, name="heartbeat", daemon=True)

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Pass on steps, and take the time that each is waited for."""
        self._clock.enter("data")
        asked = time.perf_counter()
        for step in steps:
            self._clock.enter("other")
            self._asked, self._got = asked, time.perf_counter()
            yield step
            self._clock.enter("data")
            asked = time.perf_counter()

    def step_done(self, step: int, ready: float) -> None:
        """Take note of a step; `ready` is when, by `time.perf_counter`, this rank had done its own part."""
        spent = self._clock.take(self._asked, self._got, ready)
        self._step, self._ready = step, ready
        if self._left_out:  # what is set up in them says nothing about the rest
            self._left_out -= 1
        else:
            self._now.add(step, spent)
        if ready >= self._due:
            self._due = ready + self._every_s
            self._beat()

    def _beat(self) -> None:
        time_s = time.time() - (time.perf_counter() - self._ready)
        steps = self._now.steps + self._before.steps
        found = summary([self._before, self._now]) if steps else {}
        # Two windows back, all is forgotten: one beat alone decides nothing.
        if self._now.full:
            self._before, self._now = self._now, Window()
        ready = found.pop("ready", NO_TIME)
        own_s = sum(found.get(phase, NO_TIME).mean_s for phase in PHASES)
        data_s = found.get("data", NO_TIME).mean_s
        self._last = Beat(
            self._rank, self._node, self._step, time_s, own_s, data_s, ready.mean_s, steps, found
        )
        self._news.set()

    def _write_news(self) -> None:
        over = False
        while not over:
            self._news.wait()
            self._news.clear()
            over = self._over  # before the last beat is looked at, so that none is missed
            write_beat(self._path, self._partial, self._last)
            self._after_beat()

    def __enter__(self) -> Self:
        self._leaving.enter_context(self._clock.hearing_collections())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.close()
        if self._step:
            self._beat()
        self._over = True
        self._news.set()
        self._thread.join(_LEAVES_WITHIN_S)


def write_beat(path: Path, partial: Path, beat: Beat) -> None:
    """Replace a beat in one act. It need not outlive a power cut, so the disk is not waited for; nor need it succeed."""
    if not beat.step:
        return
    with contextlib.suppress(OSError):
        make_private(path.parent)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(asdict(beat))}\n")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
