"""Whether Python and torch are recent enough, work, and have their communication backends."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.doctor.finding import Finding, passed, problem
from paceline.version import VERSION

TORCH_S = 180.0
"""Timeout of `import torch`, which takes minutes on a cold shared file system."""
_SLOW_S = 30.0
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 10)
_SLOW_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
)
_COMPARED = ("torch", "numpy", "safetensors", "xxhash", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class TorchFacts:
    """The output of `torch_probe`, or its `failure`."""

    version: str = ""
    import_s: float = 0.0
    cuda: str = ""
    backends: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    nccl: str = ""
    no_peer: list[list[int]] = field(default_factory=list)
    error: str = ""
    failure: str = ""
    import_cpu_s: float = 0.0
    import_queued_s: float = 0.0
    """How long the import waited for a CPU core; 0: not at all, or not reported by the kernel."""


def query_torch(timeout_s: float = TORCH_S, python: str = sys.executable) -> TorchFacts:
    """Ask torch in a child process, because a broken one may crash or hang."""
    command = [python, "-m", "paceline.doctor.torch_probe"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(failure=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return TorchFacts(failure=str(error))
    if done.returncode:
        return TorchFacts(failure=_failure(done.returncode, done.stderr.decode(errors="replace")))
    try:
        facts: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
        return TorchFacts(**facts)
    except (ValueError, IndexError, TypeError):
        return TorchFacts(failure="unexpected output instead of the facts")


def _failure(code: int, errors: str) -> str:
    lines = errors.strip().splitlines()
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{lines[-1].strip()[:300]} ({how})" if lines else how


def versions() -> dict[str, str]:
    """Return the package versions that must be equal on all ranks, without importing the packages."""
    found = {"python": platform.python_version(), "paceline": VERSION}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    """Judge the version of the interpreter.

    >>> judge_python((3, 9, 2), "/usr/bin/python3").ok, judge_python((3, 12, 1), "python").says
    (False, '3.12.1, python')
    """
    text = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if version[:2] < _OLDEST_PYTHON:
        return problem(
            "python",
            f"{text} is too old: 3.11 or newer is needed",
            "create an environment with Python 3.11 or newer",
        )
    return passed("python", text)


def judge_torch(torch: TorchFacts) -> Iterator[Finding]:
    """Judge version and import of torch, a small sum, and the communication backends."""
    if torch.failure:
        yield problem(
            "torch",
            f"cannot be imported: {torch.failure}",
            "reinstall it into this environment: pip install --force-reinstall torch",
        )
        return
    version = tuple(map(int, re.findall(r"\d+", torch.version)[:2]))
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built for CPUs only"
    took = f"imported in {torch.import_s:.1f} s ({torch.import_cpu_s:.1f} s of CPU)"
    text = f"{torch.version}, {built}, {took}"
    if version < _OLDEST_TORCH:
        yield problem(
            "torch",
            f"{text}, is too old: 2.10 or newer is needed",
            "pip install --upgrade 'torch>=2.10'",
        )
    elif torch.error:
        yield problem(
            "torch",
            f"{text}, but a small sum fails: {torch.error}",
            "check `nvidia-smi`; exclude this node from the job (--exclude)",
        )
    elif torch.import_s > _SLOW_S:
        cause, fix = _cause_of_slow_import(torch)
        yield problem("torch", f"{text}: {cause}; every start of a rank takes as long", fix)
    else:
        yield passed("torch", text)
    yield _judge_backends(torch)


def _cause_of_slow_import(torch: TorchFacts) -> tuple[str, str]:
    """Return what most of the time of an import was spent on, and what helps."""
    files_s = torch.import_s - torch.import_cpu_s - torch.import_queued_s
    most = max(files_s, torch.import_cpu_s, torch.import_queued_s)
    if most == files_s:
        fix = "find the slow packages: `paceline doctor --startup`; pack the environment: --pack"
        return "it waited for files", fix
    if most == torch.import_queued_s:
        return "it waited for a core", "see what uses the cores: `uptime`, `top`; then try again"
    return "it computed", "find the slow packages: `paceline doctor --startup`"


def _judge_backends(torch: TorchFacts) -> Finding:
    versions = {"nccl": f"nccl {torch.nccl}".strip()}
    have = ", ".join(versions.get(name, name) for name in torch.backends)
    needed = ["nccl", "gloo"] if torch.gpus else ["gloo"]
    missing = [name for name in needed if name not in torch.backends]
    if missing:
        return problem(
            "backends",
            f"torch has no {' and no '.join(missing)} (available: {have or 'none'})",
            "install an official torch build from pytorch.org",
        )
    return passed("backends", have)


def judge_variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """Judge environment variables that are left over from debugging and slow a training down."""
    slow = [name for name in _SLOW_VARIABLES if env.get(name) == "1"]
    if slow:
        yield problem(
            "variables",
            f"{', '.join(f'{name}=1' for name in slow)}: right results, but slow",
            f"unset {' '.join(slow)}",
        )
