"""Who may write a run: one process at a time; a later start of the same job takes the run over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import EnvironmentUnfit
from paceline.rundir import writing_to

_LOOK_S = 0.1
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Claim:
    """The right to write a run, for as long as the lock's name stands for the very file that this process holds."""

    lock: Path
    held: os.stat_result
    """The file, known by what it is: a save that outlives the run's end may still ask."""

    def check(self) -> None:
        """Raise if another process has taken the run over. Whoever makes something final asks this first."""
        if _names(self.lock, self.held):
            return
        raise EnvironmentUnfit(
            f"{self.lock.parent} was taken over by {_holder(self.lock)}",
            fix="nothing: that one goes on from the newest checkpoint, and this process must end",
        )


@contextlib.contextmanager
def claimed(lock: Path, incarnation: str = "", patience_s: float = _PATIENCE_S) -> Iterator[Claim]:
    """Hold a run's lock: no other process may write the same run. One that is just leaving is waited for.

    `incarnation` is FAMILY:NUMBER. A node may lose its scheduler and go on with a job that has been started elsewhere:
    a process of the same family and a smaller number is not waited for. It keeps a file that no longer has the name.
    """
    with writing_to(lock):
        file = _wait_for(lock, incarnation, time.monotonic() + patience_s)
    try:
        yield Claim(lock, os.fstat(file))
    finally:
        os.close(file)  # which lets go of the lock; so does the kernel when this process dies


def _wait_for(lock: Path, incarnation: str, limit: float) -> int:
    """Return a new file that is locked and bears the name."""
    while True:
        old = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            free = _locked(old) and _names(lock, os.fstat(old))
            if free or _supersedes(incarnation, _said(old).get("incarnation", "")):
                return _replace(lock, incarnation)
        finally:
            os.close(old)
        if time.monotonic() > limit:
            raise EnvironmentUnfit(
                f"{lock.parent} is being written by {_holder(lock)}",
                fix="wait for it or end it, or give this run another name=",
            )
        time.sleep(_LOOK_S)


def _replace(lock: Path, incarnation: str) -> int:
    """Give the name to a new file of ours. Where locks do not work, an earlier holder still finds its own file gone."""
    partial = lock.with_name(f".{lock.name}.{secrets.token_hex(4)}")
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _locked(file)
    who = {"holder": f"process {os.getpid()} on {socket.gethostname()}", "incarnation": incarnation}
    os.write(file, json.dumps(who).encode())
    partial.replace(lock)
    return file


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can be kept out
        return True
    return True


def _names(lock: Path, held: os.stat_result) -> bool:
    """Return whether a name stands for a certain file. The name is opened anew: a network file system may remember."""
    try:
        found = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(found), held)
    finally:
        os.close(found)


def _supersedes(mine: str, theirs: str) -> bool:
    """Return whether one start of a job comes after another of the same job.

    >>> _supersedes("17:1", "17:0"), _supersedes("17:0", "17:0"), _supersedes("18:1", "17:0"), _supersedes("", "")
    (True, False, False, False)
    """
    (family, _, number), (other, _, earlier) = mine.rpartition(":"), theirs.rpartition(":")
    numbers = number.isdecimal() and earlier.isdecimal()
    return bool(family) and family == other and numbers and int(number) > int(earlier)


def _holder(lock: Path) -> str:
    with contextlib.suppress(OSError):
        file = os.open(lock, os.O_RDONLY)
        try:
            return _said(file).get("holder", "another process")
        finally:
            os.close(file)
    return "another process"


def _said(file: int) -> dict[str, str]:
    try:
        said = json.loads(os.pread(file, 1000, 0))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
