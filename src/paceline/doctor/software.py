"""Whether Python and torch are there, work, and can carry messages."""

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
"""How long `import torch` may take; on a cold shared file system it is minutes."""
_SLOW_S = 30.0
_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 10)
_COMPARED = ("torch", "numpy", "safetensors", "xxhash", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class TorchFacts:
    """What torch said in a process of its own; `failure` if it said nothing."""

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
    """How long the import had to wait for a core; 0: none, or the kernel does not tell."""


def query_torch(timeout_s: float = TORCH_S, python: str = sys.executable) -> TorchFacts:
    """Return what torch says, or why it says nothing: it is asked in a child, for a broken one may crash or hang."""
    words = [python, "-m", "paceline.doctor.torch_probe"]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(failure=f"did not answer in {timeout_s:g} s")
    except OSError as error:
        return TorchFacts(failure=str(error))
    if done.returncode:
        return TorchFacts(
            failure=_last_words(done.returncode, done.stderr.decode(errors="replace"))
        )
    try:
        return _read(json.loads(done.stdout.decode().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return TorchFacts(failure="printed something else than it was asked for")


def _read(said: dict[str, Any]) -> TorchFacts:
    return TorchFacts(**said)


def _last_words(code: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{lines[-1][:300]} ({how})" if lines else how


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks, without importing anything."""
    found = {"python": platform.python_version(), "paceline": VERSION}
    for name in _COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    """Judge the interpreter.

    >>> judge_python((3, 9, 2), "/usr/bin/python3").ok, judge_python((3, 12, 1), "python").says
    (False, '3.12.1, python')
    """
    said = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if version[:2] < _OLDEST_PYTHON:
        return problem(
            "python", f"{said} is too old", "make an environment with Python 3.11 or newer"
        )
    return passed("python", said)


def judge_torch(torch: TorchFacts) -> Iterator[Finding]:
    """Judge torch and what carries its messages."""
    if torch.failure:
        yield problem(
            "torch",
            f"cannot be imported: {torch.failure}",
            "install it again into this environment: pip install torch",
        )
        return
    version = tuple(map(int, re.findall(r"\d+", torch.version)[:2]))
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built for CPUs"
    said = f"{torch.version}, {built}, imported in {torch.import_s:.1f} s ({torch.import_cpu_s:.1f} s of CPU)"
    waited_s = torch.import_s - torch.import_cpu_s - torch.import_queued_s
    if version < _OLDEST_TORCH:
        yield problem("torch", f"{said}, is too old", "pip install --upgrade 'torch>=2.10'")
    elif torch.error:
        yield problem(
            "torch",
            f"{said}, but cannot add: {torch.error}",
            "see `nvidia-smi`; leave this node out of the job",
        )
    elif torch.import_s > _SLOW_S and waited_s > torch.import_s / 2:
        yield problem(
            "torch",
            f"{said}: it waited for files",
            "see what takes so long: `paceline doctor --startup`; pack the environment: --pack",
        )
    else:
        yield passed("torch", said)
    yield _judge_backends(torch)


def _judge_backends(torch: TorchFacts) -> Finding:
    have = ", ".join(
        f"{name} {torch.nccl}".strip() if name == "nccl" else name for name in torch.backends
    )
    missing = [
        name for name in (["nccl"] if torch.gpus else []) + ["gloo"] if name not in torch.backends
    ]
    if missing:
        return problem(
            "backends",
            f"torch has no {' and no '.join(missing)} (it has: {have or 'none'})",
            "install a torch of pytorch.org's own builds",
        )
    return passed("backends", have)


def judge_variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """Judge variables that are left over from debugging, or hurt."""
    slow = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
    found = [f"{name}={env[name]}" for name, value in slow.items() if env.get(name) == value]
    if found:
        yield problem(
            "variables",
            f"{', '.join(found)}: right, and slow",
            f"unset {' '.join(word.partition('=')[0] for word in found)}",
        )
