"""Input of `paceline profile`: torch's trace of some steps, the phases, and the offsets between the ranks' clocks."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from paceline.config import RunConfig
from paceline.rundir import CLOCK_MARK, TENSORBOARD, make_private, profile_facts, write_whole
from paceline.telemetry.phases import PhaseClock
from paceline.world.collectives import all_gather_rows
from paceline.world.world import World

_ROUNDS = 8
_WARM_UP_STEPS = 1  # with the profiler on, because its first calls are slow


class Profiling:
    """Profiles a window of steps for `paceline profile`; idle otherwise."""

    def __init__(self, config: RunConfig, world: World, clock: PhaseClock) -> None:
        self._config, self._name = config.profile, config.name
        self._world, self._clock = world, clock
        self._lanes = config.batch.lanes
        self._steps = 0
        self._facts: dict[str, object] = {}
        self._profiler: profile | None = None

    def after_step(self) -> bool:
        """Start or stop the profiler at the right step; true once done. Every rank must call this after every step."""
        if not self._config.to:
            return False
        self._steps += 1
        begin = self._config.skip + _WARM_UP_STEPS
        if self._steps == self._config.skip:
            self._start()
        elif self._steps == begin:
            self._open_window()
        elif self._steps == begin + self._config.steps:
            self._finish()
            return True
        return False

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._world.device != "cpu":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _open_window(self) -> None:
        self._facts = {"clocks": self._exchange_clocks()}
        self._facts["marks_ns"] = [_mark_time() for _ in range(_ROUNDS)]
        self._clock.enter("other")
        self._clock.trail = []
        self._facts["begin_ns"] = time.perf_counter_ns()

    def _exchange_clocks(self) -> list[list[int]]:
        """Return when this rank entered and left each of some all-gathers, to estimate the clock offsets."""
        rounds = []
        for _ in range(_ROUNDS):
            entered = time.perf_counter_ns()
            all_gather_rows(self._world, torch.zeros(1))
            rounds.append([entered, time.perf_counter_ns()])
        return rounds

    def _finish(self) -> None:
        assert self._profiler is not None
        self._clock.enter("other")
        if self._world.device != "cpu":
            torch.cuda.synchronize()
        end_ns = time.perf_counter_ns()
        trail, self._clock.trail = self._clock.trail or [], None
        self._profiler.stop()
        folder = make_private(Path(self._config.to))
        trace = self._write_trace(self._profiler, make_private(folder / TENSORBOARD))
        facts = self._facts | self._describe(trail) | {"end_ns": end_ns, "trace": trace.name}
        write_whole(profile_facts(folder, self._world.rank), json.dumps(facts).encode())

    def _write_trace(self, profiler: profile, traces: Path) -> Path:
        name = f"rank-{self._world.rank:04d}"
        for old in traces.glob(f"{name}.*.gz"):
            old.unlink()
        tensorboard_trace_handler(str(traces), name, use_gzip=True)(profiler)
        [trace] = traces.glob(f"{name}.*.gz")
        trace.chmod(0o600)
        return trace

    def _describe(self, trail: list[tuple[str, float, float]]) -> dict[str, object]:
        phases = []
        for phase, begin, end in trail:
            phases.append([phase, round(begin * 1e9), round(end * 1e9)])
        return {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "node": socket.gethostname(),
            "boot": _boot(),
            "device": self._world.device.partition(":")[0],
            "name": self._name,
            "lanes": self._lanes,
            "steps": self._config.steps,
            "phases": phases,
        }


def _mark_time() -> int:
    """Return the time within an event of the trace. The shortest event tells best how the two clocks differ."""
    with record_function(CLOCK_MARK):
        return time.perf_counter_ns()


def _boot() -> str:
    """Return an identifier of this boot of the machine: processes that share it share the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()
