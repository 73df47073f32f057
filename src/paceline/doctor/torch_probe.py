"""What torch says of this machine, as JSON: `python -m paceline.doctor.torch_probe`. Run apart, for it may crash or hang."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Print what torch sees."""
    begun, busy = time.monotonic(), time.process_time()
    import torch
    import torch.distributed as dist

    said: dict[str, Any] = {"version": torch.__version__, "import_s": time.monotonic() - begun}
    said["import_cpu_s"], said["import_queued_s"] = time.process_time() - busy, _queued_s()
    said["cuda"] = torch.version.cuda or ""
    names = ("gloo", "nccl", "mpi")
    said["backends"] = [
        name for name in names if dist.is_available() and getattr(dist, f"is_{name}_available")()
    ]
    count = torch.cuda.device_count()
    said["gpus"] = [torch.cuda.get_device_name(one) for one in range(count)]
    said["nccl"] = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if count and "nccl" in said["backends"]
        else ""
    )  # type: ignore[no-untyped-call]
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    said["no_peer"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    said["error"] = _try_a_sum(count)
    json.dump(said, sys.stdout)


def _queued_s() -> float:
    """Return how long this process has waited for a core; 0 if the kernel does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _try_a_sum(count: int) -> str:
    """Return why a sum on one of the devices fails, if one does."""
    import torch

    for device in [f"cuda:{one}" for one in range(count)] or ["cpu"]:
        try:
            if torch.ones(8, device=device).sum().item() != 8:
                return f"{device} adds eight ones to something else"
        except RuntimeError as error:
            return f"{device}: {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    main()
