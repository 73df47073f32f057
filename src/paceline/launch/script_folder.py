"""The run folder of a script that keeps none itself: logs, process ids and exit codes of every launch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import EnvironmentUnfit
from paceline.hang.proc import process
from paceline.launch.spec import LaunchSpec, Program
from paceline.redact import without_secret_words
from paceline.rundir import RunDir, make_private
from paceline.runlock import claimed
from paceline.safe_open import open_to_write

_MOST_AT_ONCE = 100


@contextlib.contextmanager
def script_folder(program: Program, runs: Path = Path("runs")) -> Iterator[str]:
    """Hold the folder runs/SCRIPT, or runs/SCRIPT-2 while that one is in use; empty: there is none.

    A working directory that cannot be written is no reason to refuse a script that does not need it.
    """
    with contextlib.ExitStack() as stack:
        folder = ""
        if program.foreign:
            for root in _choices(Path(program.name).stem, runs):
                with contextlib.suppress(EnvironmentUnfit, OSError):
                    make_private(root / "ranks")
                    RunDir(root).refuse_links()
                    stack.enter_context(claimed(RunDir(root).launch_lock, patience_s=0))
                    folder = str(root)
                    break
        yield folder


def _choices(name: str, runs: Path) -> Iterator[Path]:
    yield runs / name
    for number in range(2, _MOST_AT_ONCE):
        if not runs.is_dir():
            return
        yield runs / f"{name}-{number}"


def log_of(spec: LaunchSpec, rank: int) -> Path | None:
    """Return the log of a rank, emptied by the first of several launches; None without a folder."""
    if not spec.folder:
        return None
    log = RunDir(Path(spec.folder)).log(rank)
    if spec.attempt == 0:
        with contextlib.suppress(OSError):
            log.unlink(missing_ok=True)
    return log


def note_launch(spec: LaunchSpec, pids: Sequence[int], dumps: Sequence[Path]) -> None:
    """Record the start of the ranks, and where each of them dumps its state on request.

    The first of several launches removes the page about a failure of an earlier command.
    """
    if spec.folder and spec.attempt == 0:
        _remove_failure(RunDir(Path(spec.folder)))
    command = [spec.target.interpreter or "python", *spec.target.argv[1:], *spec.arguments]
    launched: dict[str, object] = {
        "event": "launched",
        "command": without_secret_words(command),
        "ranks": list(spec.numbers),
        "pids": pids,
        "born": [process(pid).born for pid in pids],
        "dumps": [] if spec.target.interpreter else list(map(str, dumps)),
    }
    _note(spec, launched)


def note_end(spec: LaunchSpec, codes: Sequence[int | None]) -> None:
    """Record the exit codes of the ranks; negative: the signal that ended one, None: it was still running."""
    _note(spec, {"event": "ended", "codes": codes})


def _note(spec: LaunchSpec, facts: dict[str, object]) -> None:
    if not spec.folder:
        return
    line = json.dumps({"time_s": time.time(), "attempt": spec.attempt, **facts})
    with contextlib.suppress(OSError):
        file = open_to_write(RunDir(Path(spec.folder)).launches, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(file, "w", encoding="utf-8") as launches:
            launches.write(f"{line}\n")


def _remove_failure(folder: RunDir) -> None:
    with contextlib.suppress(OSError):
        folder.failure.unlink(missing_ok=True)
        folder.failure_facts.unlink(missing_ok=True)
