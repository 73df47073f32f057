"""Whether cores, memory and limits of this host suffice for its ranks."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.finding import Finding, passed, problem
from paceline.launch.oom import own_groups
from paceline.units import human_size

_LEAST_FILES = 4096
_LEAST_SHARED = 1 << 30
_LEAST_MEMORY = 2 << 30


@dataclass(frozen=True)
class Resources:
    """What this process may use."""

    cores: tuple[int, ...]
    """On which it may run."""
    cores_here: int
    quota: float
    """Of cores, that a container or cgroup allows; 0: no limit."""
    open_files: int
    locked_memory: int
    """In bytes; -1: no limit."""
    shared_memory: int
    """In bytes, that are free in /dev/shm."""
    shared_memory_all: int
    """0: there is no /dev/shm."""
    memory: int
    """In bytes, that a job may use."""
    has_rdma: bool


def gather_resources(root: Path = Path("/")) -> Resources:
    """Gather the facts of this host, as this process meets them; the kernel's files lie below `root`."""
    shared = _room(root / "dev/shm")
    return Resources(
        cores=_cores(),
        cores_here=os.cpu_count() or 1,
        quota=_quota(root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[
            0
        ],  # the hard limit helps only who asks for it
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory=shared[0],
        shared_memory_all=shared[1],
        memory=_memory(root),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
    )


def _cores() -> tuple[int, ...]:
    """Return the cores on which this process may run: all, where nobody is bound to some, as on macOS."""
    bound = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(bound(0) if bound else range(os.cpu_count() or 1)))


def _room(folder: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return 0, 0


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").split()
    return []


def _quota(root: Path) -> float:
    """Return how many cores' worth of time the control groups get; 0 if it is not limited."""
    pairs = []
    for group in own_groups("cpu", root):
        v1 = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        pairs += [
            pair
            for pair in (_words(group / "cpu.max"), v1)
            if len(pair) == 2 and "".join(pair).isdecimal()
        ]
    return min((int(quota) / int(period) for quota, period in pairs), default=0.0)


def _memory(root: Path) -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in own_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(group / name) if word.isdecimal()]
    return min(limits)


def judge_resources(host: Resources, ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    """Judge what this host gives to `ranks` ranks."""
    yield _judge_cores(host, ranks, env)
    yield _judge_files(host)
    if host.has_rdma:
        yield _judge_locked(host)
    if host.shared_memory_all:
        yield _judge_shared(host)
    yield _judge_memory(host, ranks)


def _judge_cores(host: Resources, ranks: int, env: Mapping[str, str]) -> Finding:
    usable = min(len(host.cores), host.quota or len(host.cores))
    threads = env.get("OMP_NUM_THREADS", "")
    said = (
        f"{usable:g} of {host.cores_here} for {ranks} rank{'s' * (ranks > 1)} ({spans(host.cores)})"
    )
    if usable < ranks:
        return problem(
            "cores",
            f"{said}: ranks share cores, and wait for each other",
            f"start at most {max(1, int(usable))} ranks here, or ask for more: --cpus-per-task",
        )
    if threads.isdecimal() and int(threads) * ranks > usable:
        return problem(
            "cores",
            f"{said}, and OMP_NUM_THREADS={threads} in each",
            f"export OMP_NUM_THREADS={max(1, int(usable // ranks))}",
        )
    return passed("cores", said)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in short.

    >>> spans([0, 1, 2, 5]), spans([3]), spans([])
    ('0-2,5', '3', 'none')
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return (
        ",".join(f"{first}-{last}" if first < last else str(first) for first, last in found)
        or "none"
    )


def _judge_files(host: Resources) -> Finding:
    if 0 <= host.open_files < _LEAST_FILES:
        return problem(
            "ulimit files",
            f"{host.open_files} open files: workers and shards need more",
            "ulimit -n 65536 in the batch script, or ask for a higher hard limit",
        )
    return passed(
        "ulimit files",
        f"{'no limit' if host.open_files < 0 else f'{host.open_files:,}'} open files",
    )


def _judge_locked(host: Resources) -> Finding:
    if host.locked_memory < 0:
        return passed("ulimit memory", "any amount may be locked, as InfiniBand needs")
    return problem(
        "ulimit memory",
        f"only {human_size(host.locked_memory)} may be locked, and InfiniBand needs more",
        "ulimit -l unlimited; under Slurm: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    )


def _judge_shared(host: Resources) -> Finding:
    said = (
        f"{human_size(host.shared_memory)} of {human_size(host.shared_memory_all)} free in /dev/shm"
    )
    if host.shared_memory < _LEAST_SHARED:
        return problem(
            "shared memory",
            f"{said}: data workers and NCCL die of a bus error when it is full",
            "docker run --shm-size=8g (or --ipc=host); remove old files from /dev/shm; or read.workers=0",
        )
    return passed("shared memory", said)


def _judge_memory(host: Resources, ranks: int) -> Finding:
    said = f"{human_size(host.memory)} for {ranks} rank{'s' * (ranks > 1)}"
    if host.memory < _LEAST_MEMORY * ranks:
        return problem("memory", said, "ask for more: --mem, or start fewer ranks")
    return passed("memory", said)
