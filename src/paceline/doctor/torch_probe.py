"""Print what torch sees on this machine as JSON: `python -m paceline.doctor.torch_probe`.

A process of its own, because a broken torch may crash or hang.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Print version, backends and GPUs of torch, and the result of a small sum on each device."""
    begun, busy = time.monotonic(), time.process_time()
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {"version": torch.__version__, "import_s": time.monotonic() - begun}
    facts["import_cpu_s"] = time.process_time() - busy
    facts["import_queued_s"] = _queued_s()
    facts["cuda"] = torch.version.cuda or ""
    backends = ["gloo", "nccl", "mpi"] if dist.is_available() else []
    backends = [name for name in backends if getattr(dist, f"is_{name}_available")()]
    facts["backends"] = backends
    count = torch.cuda.device_count()
    facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
    facts["nccl"] = ""
    if count and "nccl" in backends:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["nccl"] = ".".join(map(str, version))
    pairs = itertools.permutations(range(count), 2)
    facts["no_peer"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    facts["error"] = _try_a_sum(count)
    json.dump(facts, sys.stdout)


def _queued_s() -> float:
    """Return how long this process has waited for a CPU core; 0 if the kernel does not report it."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _try_a_sum(count: int) -> str:
    """Return the error of the first device on which a small sum fails; empty if none does."""
    import torch

    for device in [f"cuda:{index}" for index in range(count)] or ["cpu"]:
        try:
            total = torch.ones(8, device=device).sum().item()
        except RuntimeError as error:
            return f"{device}: {str(error).splitlines()[0]}"
        if total != 8:
            return f"{device}: the sum of eight ones is {total:g}"
    return ""


if __name__ == "__main__":
    main()
