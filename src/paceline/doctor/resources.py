"""Whether cores, memory and limits of this host suffice for its ranks."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.finding import Finding, passed, problem
from paceline.launch.oom import own_groups
from paceline.units import human_size

_MIN_OPEN_FILES = 4096
_MIN_SHARED_BYTES = 1 << 30
_MIN_BYTES_PER_RANK = 2 << 30


@dataclass(frozen=True)
class Resources:
    """What this process may use of its host."""

    cores: tuple[int, ...]
    """The cores in its affinity mask."""
    cores_here: int
    """All cores of the host."""
    quota: float
    """Cores' worth of time that the cgroups allow; 0: no limit."""
    open_files: int
    locked_memory: int
    """In bytes; -1: no limit."""
    shared_memory: int
    """Bytes free in /dev/shm."""
    shared_memory_all: int
    """0: there is no /dev/shm."""
    memory: int
    """Bytes that the job may use."""
    has_rdma: bool


def gather_resources(root: Path = Path("/")) -> Resources:
    """Read the limits of this process; `root` is where /proc, /sys and /dev are."""
    shared_free, shared_all = _free_and_total(root / "dev/shm")
    return Resources(
        cores=_cores(),
        cores_here=os.cpu_count() or 1,
        quota=_quota(root),
        # The soft limit: nobody raises it to the hard limit by default.
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_memory=shared_free,
        shared_memory_all=shared_all,
        memory=_memory(root),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
    )


def _cores() -> tuple[int, ...]:
    """Return the affinity mask; all cores on systems without one, such as macOS."""
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0) if affinity else range(os.cpu_count() or 1)))


def _free_and_total(folder: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return 0, 0


def _fields(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").split()
    return []


def _quota(root: Path) -> float:
    """Return the smallest CPU quota of the cgroups above this process, in cores; 0: none."""
    least = math.inf
    for group in own_groups("cpu", root):
        version_1 = _fields(group / "cpu.cfs_quota_us") + _fields(group / "cpu.cfs_period_us")
        for fields in (_fields(group / "cpu.max"), version_1):
            if len(fields) == 2 and "".join(fields).isdecimal():
                least = min(least, int(fields[0]) / int(fields[1]))
    return 0.0 if math.isinf(least) else least


def _memory(root: Path) -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in own_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(field) for field in _fields(group / name) if field.isdecimal()]
    return min(limits)


def judge_resources(host: Resources, ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    """Judge cores, open files, locked, shared and main memory for `ranks` ranks."""
    yield _judge_cores(host, ranks, env)
    yield _judge_open_files(host)
    if host.has_rdma:
        yield _judge_locked_memory(host)
    if host.shared_memory_all:
        yield _judge_shared_memory(host)
    yield _judge_memory(host, ranks)


def _judge_cores(host: Resources, ranks: int, env: Mapping[str, str]) -> Finding:
    usable = min(len(host.cores), host.quota or len(host.cores))
    threads = env.get("OMP_NUM_THREADS", "")
    cores = f"{usable:g} of {host.cores_here} cores ({spans(host.cores)})"
    text = f"{cores} for {ranks} rank{'s' * (ranks > 1)}"
    if usable < ranks:
        return problem(
            "cores",
            f"{text}: ranks share cores and slow each other down",
            f"start at most {max(1, int(usable))} ranks here, or request more: --cpus-per-task",
        )
    if threads.isdecimal() and int(threads) * ranks > usable:
        return problem(
            "cores",
            f"{text}, but OMP_NUM_THREADS={threads} threads per rank",
            f"export OMP_NUM_THREADS={max(1, int(usable // ranks))}",
        )
    return passed("cores", text)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers with runs abbreviated.

    >>> spans([0, 1, 2, 5]), spans([3]), spans([])
    ('0-2,5', '3', 'none')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in runs]
    return ",".join(texts) or "none"


def _judge_open_files(host: Resources) -> Finding:
    if 0 <= host.open_files < _MIN_OPEN_FILES:
        return problem(
            "ulimit files",
            f"at most {host.open_files} open files; data workers and shards need {_MIN_OPEN_FILES:,}",
            "put `ulimit -n 65536` into the batch script, or ask for a higher hard limit",
        )
    limit = "no limit on" if host.open_files < 0 else f"up to {host.open_files:,}"
    return passed("ulimit files", f"{limit} open files")


def _judge_locked_memory(host: Resources) -> Finding:
    if host.locked_memory < 0:
        return passed("ulimit memory", "no limit on locked memory, as InfiniBand needs")
    return problem(
        "ulimit memory",
        f"at most {human_size(host.locked_memory)} of locked memory; InfiniBand needs no limit",
        "ulimit -l unlimited; under Slurm: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
    )


def _judge_shared_memory(host: Resources) -> Finding:
    total = human_size(host.shared_memory_all)
    text = f"{human_size(host.shared_memory)} of {total} free in /dev/shm"
    if host.shared_memory < _MIN_SHARED_BYTES:
        return problem(
            "shared memory",
            f"{text}: when it is full, data workers and NCCL crash with a bus error",
            "docker run --shm-size=8g (or --ipc=host); remove old files from /dev/shm; "
            "or set read.workers=0",
        )
    return passed("shared memory", text)


def _judge_memory(host: Resources, ranks: int) -> Finding:
    text = f"{human_size(host.memory)} for {ranks} rank{'s' * (ranks > 1)}"
    if host.memory < _MIN_BYTES_PER_RANK * ranks:
        least = human_size(_MIN_BYTES_PER_RANK)
        return problem(
            "memory",
            f"{text}: less than {least} per rank",
            "request more: --mem, or start fewer ranks",
        )
    return passed("memory", text)
