"""System calls: namespaces, mounts, the name of a process."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = {
    "mnt": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "net": 0x40000000,
    "pid": 0x20000000,
}
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def leave_all_namespaces() -> None:
    """Create new namespaces; the one of process IDs applies to children only."""
    _check(_LIBC.unshare(sum(_NAMESPACES.values())), "unshare")


def enter_namespaces(pid: int, *kinds: str) -> None:
    """Enter the namespaces of a process (all kinds by default); its process IDs apply to children only."""
    handles = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds or _NAMESPACES]
    for handle in handles:  # all are open by now: with "mnt" /proc becomes another
        enter_namespace(handle)
        os.close(handle)


def enter_namespace(handle: int) -> None:
    """Enter the namespace of a file descriptor."""
    _check(_LIBC.setns(handle, 0), "setns")


def mount(kind: str, target: Path | str, options: str = "") -> None:
    """Mount a file system that has no device."""
    words = [os.fsencode(word) for word in (kind, target, kind)]
    _check(
        _LIBC.mount(*words, ctypes.c_ulong(0), os.fsencode(options) or None),
        f"mount {kind} on {target}",
    )


def bind(source: Path | str, target: Path | str, *, recursive: bool = False) -> None:
    """Bind-mount a folder."""
    flags = ctypes.c_ulong(_MS_BIND | (_MS_REC if recursive else 0))
    _check(
        _LIBC.mount(os.fsencode(source), os.fsencode(target), None, flags, None),
        f"bind {source} to {target}",
    )


def keep_mounts_to_ourselves() -> None:
    """Make all mounts private to this namespace."""
    _check(
        _LIBC.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "private mounts"
    )


def set_host_name(name: str) -> None:
    """Set the host name."""
    _check(_LIBC.sethostname(name.encode(), len(name)), "sethostname")


def set_process_name(name: str) -> None:
    """Set the name shown in process lists."""
    _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
