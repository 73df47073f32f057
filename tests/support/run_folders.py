"""Runs that were never trained: their files, as a training would have left them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from paceline.cluster.registry import Submission
from paceline.events import CheckpointSaved, Event, EventLog, RunStarted, StepDone
from paceline.rundir import RunDir, make_private
from paceline.telemetry.heartbeat import Beat


def started(from_step: int = 0, *, ranks: int = 2, time_s: float | None = None) -> RunStarted:
    when = time.time() if time_s is None else time_s
    return RunStarted(
        ranks, "cpu", "slurm", 3200, 32, 4, 0.1, 1000, "two\nlines", from_step, time_s=when
    )


def trained(first: int, last: int, every: int = 10) -> list[Event]:
    steps: list[Event] = [
        StepDone(n, 1, n * 32, 100 / n, 0.1, 640.0) for n in range(first, last + 1, every)
    ]
    return [*steps, CheckpointSaved(last, "there", 2_000_000)]


def make_run(root: Path, *events: Event) -> RunDir:
    folder = RunDir(make_private(root))
    folder.config.write_text('name = "x"\n')
    with EventLog(folder.events) as log:
        for event in events:
            log(event)
    return folder


def put_beat(
    folder: RunDir, rank: int, step: int = 5, own_s: float = 0.1, time_s: float | None = None
) -> None:
    make_private(folder.beat(rank).parent)
    when = time.time() if time_s is None else time_s
    folder.beat(rank).write_text(json.dumps(asdict(Beat(rank, f"n{rank}", step, when, own_s, 0.0))))


def squeue_line(
    job: str, state: str, name: str, *, reason: str = "None", submitted_s: float | None = None
) -> str:
    """Return what squeue prints of a job of this user, submitted now unless another time is given."""
    when = time.gmtime(submitted_s)
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", when)
    nodes = "n1" if state == "RUNNING" else ""
    used, left = ("0:10", "59:50") if nodes else ("0:00", "1:00:00")
    cells = [job, state, reason, used, left, "1", nodes, clock, str(os.getuid()), name]
    return "\x1f".join(cells)


def submission(job: str, run: Path, log: str = "", time_s: float | None = None) -> Submission:
    when = time.time() if time_s is None else time_s
    return Submission(
        job, str(run), "train.py", 1, 2, "1:00:00", log or str(run / "jobs" / f"{job}.log"), when
    )


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[None]:
    """Hold a run's lock as the process that writes it does."""
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, b'{"holder": "process 4711 on n1"}')
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
    os.close(file)
