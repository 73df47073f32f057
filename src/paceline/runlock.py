"""The lock of a run folder: one process writes at a time; a later start of the same job takes the run over."""

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
from paceline.safe_open import UnsafeFile, open_plain, open_to_write, parse_json

_POLL_S = 0.1
_PATIENCE_S = 10.0
_LONGEST = 1000  # bytes


@dataclass(frozen=True)
class Claim:
    """The right to write a run, valid while the lock's path leads to the file that this process holds."""

    lock: Path
    held: os.stat_result
    """Identifies the held file, also after it is closed: a save may outlive the run."""

    def check(self) -> None:
        """Raise if another process has taken the run over. Call this before anything becomes final."""
        if _leads_to(self.lock, self.held):
            return
        raise EnvironmentUnfit(
            f"{self.lock.parent} was taken over by {_holder(self.lock)}",
            fix="nothing to do: that process resumes from the newest checkpoint, and this one exits",
        )


@contextlib.contextmanager
def claimed(lock: Path, incarnation: str = "", patience_s: float = _PATIENCE_S) -> Iterator[Claim]:
    """Hold a run's lock, so that no other process writes the run; wait for a process that is about to exit.

    `incarnation` is FAMILY:NUMBER. A node may lose its scheduler and continue a job that was restarted elsewhere. A
    process of the same family with a smaller number is not waited for: its file loses the lock's path.
    """
    with writing_to(lock):
        file = _wait_for(lock, incarnation, time.monotonic() + patience_s)
    try:
        yield Claim(lock, os.fstat(file))
    finally:
        os.close(file)  # releases the lock; the kernel does the same if this process dies


def is_held(lock: Path) -> bool:
    """Return whether a process holds the lock of a run, as far as this host can see."""
    try:
        file = open_plain(lock)
    except OSError:
        return False
    try:
        # Released at once; a process that starts meanwhile tries again.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _wait_for(lock: Path, incarnation: str, limit: float) -> int:
    """Return a new, locked file at the lock's path."""
    while True:
        old = open_to_write(lock, os.O_RDWR)
        try:
            is_free = _try_lock(old) and _leads_to(lock, os.fstat(old))
            if is_free or _supersedes(incarnation, _read(old).get("incarnation", "")):
                return _replace(lock, incarnation)
        finally:
            os.close(old)
        if time.monotonic() > limit:
            raise EnvironmentUnfit(
                f"{lock.parent} is being written by {_holder(lock)}",
                fix="wait until it ends, stop it, or give this run another name=",
            )
        time.sleep(_POLL_S)


def _replace(lock: Path, incarnation: str) -> int:
    """Move a new file to the lock's path. Without working locks, an earlier holder still notices this."""
    partial = lock.with_name(f".{lock.name}.{secrets.token_hex(4)}")
    file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _try_lock(file)
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    os.write(file, json.dumps({"holder": holder, "incarnation": incarnation}).encode())
    partial.replace(lock)
    return file


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks cannot keep others out
        return True
    return True


def _leads_to(lock: Path, held: os.stat_result) -> bool:
    """Return whether a path leads to this file. Opens the path, because a network file system may cache stat."""
    try:
        file = open_plain(lock)
    except (FileNotFoundError, UnsafeFile):
        return False
    try:
        return os.path.samestat(os.fstat(file), held)
    finally:
        os.close(file)


def _supersedes(incarnation: str, other: str) -> bool:
    """Return whether the first is a later start of the same job than the second.

    >>> _supersedes("17:1", "17:0"), _supersedes("17:0", "17:0"), _supersedes("18:1", "17:0"), _supersedes("", "")
    (True, False, False, False)
    """
    family, _, number = incarnation.rpartition(":")
    other_family, _, other_number = other.rpartition(":")
    if not family or family != other_family:
        return False
    if not (_is_number(number) and _is_number(other_number)):
        return False
    return int(number) > int(other_number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _holder(lock: Path) -> str:
    with contextlib.suppress(OSError):
        file = open_plain(lock)
        try:
            return _read(file).get("holder", "another process")
        finally:
            os.close(file)
    return "another process"


def _read(file: int) -> dict[str, str]:
    try:
        content = parse_json(os.pread(file, _LONGEST, 0))
    except ValueError:
        return {}
    facts = content.items() if isinstance(content, dict) else []
    return {str(name): value for name, value in facts if isinstance(value, str)}
