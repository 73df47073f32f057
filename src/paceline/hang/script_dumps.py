"""Stacks and collectives of the ranks of a script that does not use Paceline: ask for them, wait, read them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import handover
from paceline.hang.crash import parse_stacks
from paceline.hang.flight_recorder import Collective
from paceline.hang.proc import Process, catches, has_open, refresh
from paceline.hang.rank_report import parse_collective, parse_stack
from paceline.hang.stacks import MAIN, CodeLine, Stack, kind_of
from paceline.safe_open import read_json, read_text, reading

_ANSWER_S = 3.0
_SIGNAL_S = 2.0
"""How long a rank has to answer, and how long one that did not has to react to a signal."""
_LOOK_S = 0.1
_MOST_BYTES = 1 << 20


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
    """Ask all ranks at once, and return what they answer within a few seconds."""
    asked = [rank for rank in ranks if rank.dump and _may_ask(rank)]
    waiting = [rank for rank in asked if _request(_path(rank))]
    _wait(lambda: all(map(_has_answered, waiting)), _ANSWER_S)
    signalled = [rank for rank in asked if not _has_answered(rank) and _signal(rank.process)]
    sizes = [-1]

    def is_written() -> bool:
        # faulthandler writes a stack in many small pieces, and no mark at its end.
        before, sizes[:] = list(sizes), [_size(_path(rank)) for rank in signalled]
        return all(sizes) and sizes == before

    _wait(is_written, _SIGNAL_S if signalled else 0.0)
    dumps = {rank.rank: _read(_path(rank)) for rank in asked}
    for rank in ranks:
        if rank.dump is None:
            dumps[rank.rank] = RankDump(_stacks_from_outside(rank.process))
    return dumps


def _wait(is_so: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not is_so():
        time.sleep(_LOOK_S)


def _path(rank: LaunchedRank) -> Path:
    assert rank.dump is not None
    return rank.dump


def _may_ask(rank: LaunchedRank) -> bool:
    """Return whether a rank can answer; its old answers are removed.

    Somebody else may have written the record that names the files: only one that the rank itself holds open is emptied.
    """
    process, dump = refresh(rank.process), _path(rank)
    if not process.can_respond or not has_open(process.pid, handover.stacks_file(dump)):
        return False
    try:
        os.truncate(handover.stacks_file(dump), 0)
        handover.answer_file(dump).unlink(missing_ok=True)
    except OSError:  # it has just exited, or belongs to another user
        return False
    return True


def _request(dump: Path) -> bool:
    """Ask the thread of a rank; return whether there is one."""
    with contextlib.suppress(OSError):  # it has no thread
        fifo = os.open(handover.request_fifo(dump), os.O_WRONLY | os.O_NONBLOCK)
        os.write(fifo, b"?")
        os.close(fifo)
        return True
    return False


def _signal(process: Process) -> bool:
    """Ask by the signal, which would end a process that does not handle it."""
    if not refresh(process).can_respond or not catches(process.pid, handover.DUMP_SIGNAL):
        return False
    with contextlib.suppress(OSError):
        os.kill(process.pid, handover.DUMP_SIGNAL)
        return True
    return False


def _size(dump: Path) -> int:
    try:
        return handover.stacks_file(dump).stat().st_size
    except OSError:
        return 0


def _has_answered(rank: LaunchedRank) -> bool:
    return handover.answer_file(_path(rank)).exists()


def _read(dump: Path) -> RankDump:
    """Return the answer of the thread, or else the stack that the signal has left."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        answer = read_json(handover.answer_file(dump), _MOST_BYTES)
        stacks = sorted(map(parse_stack, answer["stacks"]), key=lambda stack: stack.thread == MAIN)
        return RankDump(_shown(stacks), tuple(map(parse_collective, answer["collectives"])))
    text = ""
    with contextlib.suppress(OSError), reading(handover.stacks_file(dump)) as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    return RankDump(_shown(parse_stacks(text)))


def _shown(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    """Return the stacks of the script, the main thread first, each from its first frame outside the launcher on."""
    found = []
    for stack in reversed(stacks):
        kinds = [place.kind for place in stack.places]
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
