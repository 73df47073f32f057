"""What `paceline profile` reads: torch's trace of some steps, the phases, and how this rank's clock stands to the others'."""

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
_WARM = 1  # steps with the profiler on, before those that count: its own first calls are slow


class Profiling:
    """Measures a window of steps when profile asks for it, and is idle otherwise."""

    def __init__(self, config: RunConfig, world: World, clock: PhaseClock) -> None:
        self._config, self._name, self._world, self._clock = (
            config.profile,
            config.name,
            world,
            clock,
        )
        self._lanes = config.batch.lanes
        self._steps = 0
        self._facts: dict[str, object] = {}
        self._profiler: profile | None = None

    def after_step(self) -> bool:
        """Begin or end where it is time; true when all is measured. Every rank must call this after every step."""
        if not self._config.to:
            return False
        self._steps += 1
        begin = self._config.skip + _WARM
        if self._steps == self._config.skip:
            self._start()
        elif self._steps == begin:
            self._open_window()
        elif self._steps == begin + self._config.steps:
            self._finish()
            return True
        return False

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU] + (
            [ProfilerActivity.CUDA] if self._world.device != "cpu" else []
        )
        self._profiler = profile(activities=kinds)
        self._profiler.start()

    def _open_window(self) -> None:
        self._facts = {"clocks": self._exchange_clocks()}
        with record_function(CLOCK_MARK):
            self._facts["mark_ns"] = time.perf_counter_ns()
        self._clock.enter("other")
        self._clock.trail = []
        self._facts["begin_ns"] = time.perf_counter_ns()

    def _exchange_clocks(self) -> list[list[int]]:
        """Return for some rounds in which all ranks hear of all, when this one began to speak and when it had heard."""
        rounds = []
        for _ in range(_ROUNDS):
            spoke = time.perf_counter_ns()
            all_gather_rows(self._world, torch.zeros(1))
            rounds.append([spoke, time.perf_counter_ns()])
        return rounds

    def _finish(self) -> None:
        assert self._profiler is not None
        self._clock.enter("other")
        if self._world.device != "cpu":
            torch.cuda.synchronize()
        end_ns = time.perf_counter_ns()
        trail, self._clock.trail = self._clock.trail or [], None
        self._profiler.stop()
        home = make_private(Path(self._config.to))
        traces = make_private(home / TENSORBOARD)
        name = f"rank-{self._world.rank:04d}"
        for old in traces.glob(f"{name}.*.gz"):
            old.unlink()
        tensorboard_trace_handler(str(traces), name, use_gzip=True)(self._profiler)
        [trace] = traces.glob(f"{name}.*.gz")
        trace.chmod(0o600)
        facts = self._facts | {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "node": socket.gethostname(),
            "boot": _boot(),
            "device": self._world.device.partition(":")[0],
            "name": self._name,
            "lanes": self._lanes,
            "steps": self._config.steps,
            "end_ns": end_ns,
            "trace": trace.name,
            "phases": [
                [phase, round(begin * 1e9), round(end * 1e9)] for phase, begin, end in trail
            ],
        }
        write_whole(profile_facts(home, self._world.rank), json.dumps(facts).encode())


def _boot() -> str:
    """Return what tells one start of a machine from all others: whoever shares it shares the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()
