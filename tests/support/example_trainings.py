"""Trains an example on one rank, and on two of which one is killed and three that resume."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import paceline
from paceline import handover
from support.processes import run_on_processes

STEPS, KILLED_AT = 6, 5
SETTINGS = {
    "name": "run",
    "batch.global_size": 16,
    "batch.lanes": 4,
    "steps": STEPS,
    "checkpoint.every": "2steps",
}
STARTS = [("one", 1, -1), ("killed", 2, KILLED_AT), ("killed", 3, -1)]
"""Run folder, ranks, and the step in which the last rank is killed."""


def check_same_bits(script: Path, folder: Path) -> tuple[int, dict[str, str], list[Any]]:
    """Train a script everywhere, below a folder; return its one checkpoint: step, digests, other state."""
    given = {"script": str(script), "folder": str(folder)}
    run_on_processes(train_everywhere, 1, folder, {}, given)
    first = checkpoint(folder / "one")
    assert first[0] == STEPS
    assert checkpoint(folder / "killed") == first
    started, resumed = steps_at_start(folder / "killed")
    assert (started, resumed > 0) == (0, True)
    return first


def train_everywhere(script: str, folder: str) -> None:
    """Import an example once, and fork the ranks of every start from here: imports are slow."""
    sys.dont_write_bytecode = True
    module = imported(Path(script))
    for number, (runs, ranks, kill_at) in enumerate(STARTS):
        meeting = Path(folder) / f"start-{number}"
        meeting.mkdir(mode=0o700)
        settings = SETTINGS | {"runs": f"{folder}/{runs}"}
        pids = []
        for rank in range(ranks):
            is_killed = rank == ranks - 1 and kill_at >= 0
            pids.append(
                forked(module, rank, ranks, meeting, settings, kill_at if is_killed else -1)
            )
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        errors = [path.read_text() for path in meeting.glob("error-*")]
        expected = [0] * ranks if kill_at < 0 else [1] * (ranks - 1) + [-signal.SIGKILL]
        assert codes == expected, (runs, codes, *errors)


def imported(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def forked(
    module: ModuleType, rank: int, ranks: int, meeting: Path, settings: dict[str, Any], kill_at: int
) -> int:
    """Start one rank; return its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            handover.MEETING: str(meeting / "meeting"),
        }
        train(module, settings, kill_at)
    except BaseException:
        (meeting / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def train(module: ModuleType, settings: dict[str, Any], kill_at: int) -> None:
    from paceline.config.values import with_settings
    from paceline.train.run_loop import RunLoop
    from paceline.world.parent_death import die_with_parent

    die_with_parent()
    multiprocessing.current_process()._config.pop("daemon", None)  # a daemon can have no workers
    begin_step = RunLoop.begin_step

    def begin_or_die(loop: Any, batch: Any) -> None:
        if batch.plan.index == kill_at:
            wait_for_a_checkpoint(Path(settings["runs"]) / "run" / "checkpoints")
            os.kill(os.getpid(), signal.SIGKILL)
        begin_step(loop, batch)

    RunLoop.begin_step = begin_or_die
    kind = getattr(module, "Config", paceline.RunConfig)
    module.main(with_settings(kind(), settings))


def wait_for_a_checkpoint(folder: Path, most_s: float = 20) -> None:
    """Wait until a thread of the first rank has written a checkpoint."""
    limit = time.monotonic() + most_s
    while not any(folder.glob("step-*/manifest.json")) and time.monotonic() < limit:
        time.sleep(0.01)


def checkpoint(runs: Path) -> tuple[int, dict[str, str], list[Any]]:
    """Return the step of the newest checkpoint, the digests of its tensors, and its other state."""
    from paceline.checkpoint.local_storage import LocalStorage
    from paceline.checkpoint.restore import newest_good
    from paceline.world.world import World
    from support.checkpoint_contents import restore

    storage = LocalStorage(runs / "run" / "checkpoints")
    step, digests, _ = restore(storage)
    manifest = newest_good(storage, World(), lambda *_: None)
    assert manifest is not None
    return step, digests, [manifest.values[name] for name in ("tracked", "groups", "numbers")]


def steps_at_start(runs: Path) -> list[int]:
    """Return the steps that were done when each start began."""
    lines = (runs / "run" / "events.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    return [event["from_step"] for event in events if event["event"] == "RunStarted"]
