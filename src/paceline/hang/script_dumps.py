"""Stacks and collectives of the ranks of a script that does not use Paceline: ask for them, wait, read them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.hang.crash import parse_stacks
from paceline.hang.flight_recorder import Collective
from paceline.hang.proc import Process, catches, has_open, refresh
from paceline.hang.rank_report import parse_collective
from paceline.hang.stacks import MAIN, CodeLine, Stack, kind_of
from paceline.safe_open import read_json, read_text, reading

_ANSWER_S = 3.0
_LOOK_S = 0.1
_MOST_BYTES = 1 << 20
_DUMPING = "/paceline/launch/rank_dump.py"


@dataclass(frozen=True)
class LaunchedRank:
    """A process that `paceline run` started."""

    rank: int
    process: Process
    dump: Path | None
    """Where it dumps its state; None: another interpreter runs it, which answers no request."""


@dataclass(frozen=True)
class RankDump:
    """Where a rank is."""

    stacks: tuple[Stack, ...] = ()
    """The main thread first; empty: it did not answer."""
    collectives: tuple[Collective, ...] = ()


def request_dumps(ranks: Sequence[LaunchedRank]) -> dict[int, RankDump]:
    """Ask all ranks at once, and return what they answer within 3 s."""
    asked = [rank for rank in ranks if rank.dump and _request(rank.process, rank.dump)]
    limit, sizes = time.monotonic() + _ANSWER_S, [-1]
    while time.monotonic() < limit:
        time.sleep(_LOOK_S)
        before, sizes = sizes, [_size(handover.stacks_file(_path(rank))) for rank in asked]
        # faulthandler writes a dump in many small pieces, and no mark at its end.
        if all(sizes) and sizes == before and all(map(_has_collectives, asked)):
            break
    dumps = {rank.rank: _read(rank) for rank in asked}
    for rank in ranks:
        if rank.dump is None:
            dumps[rank.rank] = RankDump(_stacks_from_outside(rank.process))
    return dumps


def _path(rank: LaunchedRank) -> Path:
    assert rank.dump is not None
    return rank.dump


def _request(process: Process, dump: Path) -> bool:
    """Ask a rank for its dump; return whether it can answer.

    The signal would end a process that does not handle it. Somebody else may have written the record that names the
    file: only one that the rank itself holds open is emptied.
    """
    if not refresh(process).can_respond or not catches(process.pid, handover.DUMP_SIGNAL):
        return False
    if not has_open(process.pid, handover.stacks_file(dump)):
        return False
    try:
        os.truncate(handover.stacks_file(dump), 0)
        handover.collectives_file(dump).unlink(missing_ok=True)
        os.kill(process.pid, handover.DUMP_SIGNAL)
    except OSError:  # it has just exited, or belongs to another user
        return False
    with contextlib.suppress(OSError):  # the script has not read its rank yet
        fifo = os.open(handover.request_fifo(dump), os.O_WRONLY | os.O_NONBLOCK)
        os.write(fifo, b"?")
        os.close(fifo)
    return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _has_collectives(rank: LaunchedRank) -> bool:
    dump = _path(rank)
    return handover.collectives_file(dump).exists() or not handover.request_fifo(dump).exists()


def _read(rank: LaunchedRank) -> RankDump:
    dump = _path(rank)
    text = ""
    collectives: tuple[Collective, ...] = ()
    with contextlib.suppress(OSError), reading(handover.stacks_file(dump)) as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        entries = read_json(handover.collectives_file(dump), _MOST_BYTES)
        collectives = tuple(map(parse_collective, entries))
    return RankDump(_shown(parse_stacks(text)), collectives)


def _shown(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    """Return the stacks of the script, the main thread first, each from its first frame outside the launcher on."""
    found = []
    for stack in reversed(stacks):
        kinds = [place.kind for place in stack.places]
        if any(place.file.endswith(_DUMPING) for place in stack.places):
            continue
        start = kinds.index("user") if "user" in kinds else 0
        found.append(Stack(stack.thread, stack.places[start:]))
    return tuple(found)


def code_of(process: Process, place: CodeLine) -> str:
    """Return the text of a line of user code; its path is relative to the folder of the rank. Empty: unknown."""
    if place.kind != "user":
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        file = Path(f"/proc/{process.pid}/cwd") / place.file
        return read_text(file, _MOST_BYTES, links=True).splitlines()[place.line - 1].strip()
    return ""


def _outside_reader() -> str:
    """Return the path of py-spy, which reads the stacks of any Python process; empty: it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""


def _stacks_from_outside(process: Process) -> tuple[Stack, ...]:
    """Return the stacks that py-spy reads; empty: it is not installed, or the kernel does not allow it."""
    reader = _outside_reader()
    if not reader or not refresh(process).can_respond:
        return ()
    command = [reader, "dump", "--json", "--pid", str(process.pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ANSWER_S, check=True)
        threads = json.loads(done.stdout)
        stacks = [_stack_from_outside(thread) for thread in threads]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
        return ()
    return _shown([stack for stack in reversed(stacks) if stack.places])


def _stack_from_outside(thread: dict[str, Any]) -> Stack:
    name = str(thread["thread_name"] or f"thread {thread['os_thread_id']}")
    if thread["os_thread_id"] == thread["pid"]:
        name = MAIN
    places = []
    for frame in reversed(thread["frames"]):
        file = str(frame["filename"])
        places.append(CodeLine(file, int(frame["line"]), str(frame["name"]), kind_of(file)))
    return Stack(name, tuple(places))
