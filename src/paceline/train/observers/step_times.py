"""Times of each step on this rank, for `paceline scale`: begin, samples read, own work done, end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from paceline.config import RunConfig
from paceline.exact.strategy import Strategy
from paceline.rundir import make_private, times_file, write_whole, writing_to
from paceline.world.collectives import WAITED
from paceline.world.machine import machine_facts
from paceline.world.world import World

T = TypeVar("T")


class StepTimes:
    """Records the times of every step if `record.times` is set; idle otherwise."""

    def __init__(self, config: RunConfig, world: World, strategy: Strategy) -> None:
        self._world, self._strategy = world, strategy
        self._folder = config.record.times
        self._begun = self._read = self._waited = 0.0
        self._steps: list[tuple[int, float, float, float, float, float]] = []

    def reading(self, steps: Iterable[T]) -> Iterable[T]:
        """Pass steps on; measure the time spent waiting for each."""
        return self._timed(steps) if self._folder else steps

    def _timed(self, steps: Iterable[T]) -> Iterator[T]:
        begun = time.perf_counter()
        for step in steps:
            self._begun, self._read, self._waited = begun, time.perf_counter(), WAITED.seconds
            yield step
            begun = time.perf_counter()

    def step_done(self, samples: int, ready: float) -> None:
        """Record a step; `ready` is the `time.perf_counter` at the end of this rank's own work."""
        if not self._folder:
            return
        if self._world.device != "cpu":
            torch.cuda.synchronize()
        waited = WAITED.seconds - self._waited
        self._steps.append((samples, self._begun, self._read, ready, time.perf_counter(), waited))

    def write(self) -> None:
        """Write the times of all steps to a file."""
        if self._folder:
            file = times_file(Path(self._folder), self._world.rank)
            with writing_to(file):
                make_private(file.parent)
                write_whole(file, json.dumps(self._facts() | {"steps": self._steps}).encode())

    def _facts(self) -> dict[str, object]:
        """Return facts that tell which times can be compared."""
        backend = dist.get_backend() if dist.is_initialized() else ""
        gpu = torch.cuda.get_device_name() if self._world.device != "cpu" else ""
        return {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "nodes": self._world.nodes,
            "device": self._world.device,
            "gpu": gpu,
            "cores": _available_cores(),
            "backend": backend,
            "torch": torch.__version__,
            **(machine_facts() if self._world.is_main else {}),
            "sees_waits": self._strategy.sees_waits,
            # A replayed step is ready when it is launched on the GPU, not when the GPU has done it.
            "sees_ready": not self._strategy.captures,
        }


def _available_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
