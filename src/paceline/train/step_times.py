"""When each step of this rank began, had its samples, had done its own part, and ended: what `paceline scale` asks for."""

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
from paceline.rundir import make_private, times_file, write_whole, writing_to
from paceline.world.collectives import WAITED
from paceline.world.machine import machine_facts
from paceline.world.world import World

T = TypeVar("T")


class StepTimes:
    """Keeps the times of every step where they are asked for, and is idle otherwise."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config, world
        self._folder = config.record.times
        self._asked = self._got = self._waited = 0.0
        self._steps: list[tuple[int, float, float, float, float, float]] = []

    def reading(self, steps: Iterable[T]) -> Iterable[T]:
        """Pass on steps, and take the time that each is waited for."""
        return self._timed(steps) if self._folder else steps

    def _timed(self, steps: Iterable[T]) -> Iterator[T]:
        asked = time.perf_counter()
        for step in steps:
            self._asked, self._got, self._waited = asked, time.perf_counter(), WAITED.seconds
            yield step
            asked = time.perf_counter()

    def step_done(self, samples: int, ready: float) -> None:
        """Take note of a step; `ready` is when, by `time.perf_counter`, this rank had done its own part."""
        if not self._folder:
            return
        if self._world.device != "cpu":
            torch.cuda.synchronize()
        waited = WAITED.seconds - self._waited
        self._steps.append((samples, self._asked, self._got, ready, time.perf_counter(), waited))

    def write(self) -> None:
        """Write down the times of all steps."""
        if self._folder:
            file = times_file(Path(self._folder), self._world.rank)
            with writing_to(file):
                make_private(file.parent)
                write_whole(file, json.dumps(self._facts() | {"steps": self._steps}).encode())

    def _facts(self) -> dict[str, object]:
        """Return what says how far the times can be compared."""
        backend = dist.get_backend() if dist.is_initialized() else ""
        alone, config = self._world.size == 1, self._config
        gpu = torch.cuda.get_device_name() if self._world.device != "cpu" else ""
        return {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "nodes": self._world.nodes,
            "device": self._world.device,
            "gpu": gpu,
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "backend": backend,
            "torch": torch.__version__,
            **(machine_facts() if self._world.is_main else {}),
            # DDP's own sum, FSDP and NCCL wait where Python does not see it.
            "sees_waits": alone
            or (config.exact and config.parallel == "ddp" and backend == "gloo"),
            # A recorded step is ready when it is handed to the GPU, not when the GPU has done it.
            "sees_ready": self._world.device == "cpu" or config.capture == "false",
        }
