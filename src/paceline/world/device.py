"""Which device this rank computes on, and what carries its messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store
from torch.utils import deterministic

from paceline.config import RunConfig
from paceline.errors import EnvironmentUnfit
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

# Of bf16, from the makers' data sheets, by words of the name; the longer name comes first.
_PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def choose_device(world: World, config: RunConfig) -> str:
    """Return this rank's device: its own GPU if it sees one, else the CPU."""
    if config.device == "cpu":
        return "cpu"
    visible = torch.cuda.device_count()
    if visible == 0 and config.device == "cuda":
        raise EnvironmentUnfit(
            "device=cuda, but this rank sees no GPU",
            fix="ask the scheduler for GPUs, or set device=cpu",
        )
    return f"cuda:{gpu_index(world, visible)}" if visible else "cpu"


def gpu_index(world: World, visible: int) -> int:
    """Return which of the visible GPUs is this rank's.

    A scheduler may show all GPUs of the node to each task, or each task its own one as number 0.

    >>> gpu_index(World(local_rank=3, local_size=4), 4), gpu_index(World(local_rank=3, local_size=4), 1)
    (3, 0)
    """
    if visible == 1:
        return 0
    if world.local_rank >= visible:
        raise EnvironmentUnfit(
            f"local rank {world.local_rank} sees only {visible} GPUs for {world.local_size} ranks",
            fix=f"start at most {visible} ranks on this node, or set device=cpu",
        )
    return world.local_rank


def prepare_device(world: World, config: RunConfig) -> None:
    """Set the threads and, where the bits must hold, deterministic kernels."""
    torch.set_num_threads(config.threads)
    if world.device == "cpu":
        return
    torch.cuda.set_device(torch.device(world.device))
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    if config.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.use_deterministic_algorithms(mode=True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # or all memory is written twice
    torch.backends.cudnn.benchmark = not config.exact


def peak_flops(device: str, precision: str) -> float:
    """Return how many operations a second a GPU does at best, without sparsity; 0: not known."""
    if device == "cpu" or precision == "fp32":
        return 0.0
    name = torch.cuda.get_device_name(device)
    words = f" {' '.join(re.split('[^A-Za-z0-9]+', name))} "
    best = next((peak for word, peak in _PEAKS.items() if f" {word} " in words), 0.0)
    return best / 2 if precision == "tf32" else best


def gpu_uuid(world: World) -> str:
    """Return what tells this rank's GPU from all others; empty: it has none."""
    return str(torch.cuda.get_device_properties(world.device).uuid) if world.device != "cpu" else ""


def peak_of_all(world: World, precision: str) -> float:
    """Return what all GPUs of a world do at best together; 0: not known. Every rank must call this."""
    told = all_gather_texts(world, f"{gpu_uuid(world)} {peak_flops(world.device, precision)}")
    return sum_of_gpus(told)


def sum_of_gpus(told: Sequence[str]) -> float:
    """Return the sum over cards, each counted once, however many ranks share it; 0 if that of any is not known.

    >>> sum_of_gpus(["a 3.0", "a 3.0", "b 4.0"]), sum_of_gpus(["a 3.0", " 0.0"]), sum_of_gpus(["a 3.0", "b 0.0"])
    (7.0, 0.0, 0.0)
    """
    peaks = {card: float(peak) for card, _, peak in (words.partition(" ") for words in told)}
    return sum(peaks.values()) if all(peaks.values()) else 0.0


def choose_backend(world: World, config: RunConfig, store: Store) -> str:
    """Return nccl when every rank has a GPU of its own, else gloo. Every rank must call this."""
    if config.backend != "auto":
        return config.backend
    store.set(f"gpu-{world.rank}", gpu_uuid(world))
    everyone = [store.get(f"gpu-{rank}").decode() for rank in range(world.size)]
    own_gpu_each = all(everyone) and len(set(everyone)) == world.size
    return "nccl" if own_gpu_each else "gloo"
