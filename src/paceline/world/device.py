"""The device of this rank, and the backend of its collectives."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence

import torch
from torch.utils import deterministic

from paceline.config import RunConfig
from paceline.errors import EnvironmentUnfit
from paceline.world.collectives import all_gather_texts
from paceline.world.compile_cache import keep_compiled_code
from paceline.world.machine import cpu_features
from paceline.world.signed_store import Board
from paceline.world.world import World

# FLOP/s of bf16 from the data sheets, by a part of the name; the longer name comes first.
_PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def choose_device(world: World, config: RunConfig) -> str:
    """Return "cuda:N" if this rank sees a GPU, else "cpu"."""
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
    """Return the number of this rank's GPU among the visible ones.

    A scheduler may show all GPUs of the node to each task, or to each task its own GPU as number 0.

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
    """Set the number of threads, the precision and, with exact=true, deterministic kernels."""
    torch.set_num_threads(config.threads)
    if "DNNL_JIT_PROFILE" not in os.environ:  # the older name
        os.environ.setdefault(
            "ONEDNN_JIT_PROFILE", "0"
        )  # on ARM, a file /tmp/perf-PID.map per process
    if config.compile or world.device != "cpu":  # a GPU may compile kernels without being asked
        _prepare_compilation(world, config)
    if world.device == "cpu":
        return
    torch.cuda.set_device(torch.device(world.device))
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    if config.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its start
        torch.use_deterministic_algorithms(mode=True)
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # otherwise all memory is written twice
    torch.backends.cudnn.benchmark = not config.exact


def _prepare_compilation(world: World, config: RunConfig) -> None:
    """Keep compiled code for the next start.

    With exact=true torch chooses no GPU kernel by its time: ranks could differ.
    """
    problem = keep_compiled_code(os.environ, compile_facts(world.device, config))
    if problem and config.compile and world.local_rank == 0:
        print(problem, file=sys.stderr, flush=True)
    if not (config.compile and config.exact) or world.device == "cpu":
        return
    from torch._inductor import config as inductor

    inductor.shape_padding = False
    if inductor.max_autotune or inductor.max_autotune_gemm or inductor.coordinate_descent_tuning:
        inductor.deterministic = True


def compile_facts(device: str, config: RunConfig) -> dict[str, object]:
    """Return what compiled code depends on besides its source.

    torch's own keys leave out the CPU and, in 2.11, the threads.
    """
    card = "cpu"
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)} sm{major}{minor}"
    return {
        "torch": torch.__version__,
        "commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "card": card,
        "cpu": cpu_features(),
        "threads": config.threads,
        "exact": config.exact,
    }


def peak_flops(device: str, precision: str) -> float:
    """Return the peak FLOP/s of a GPU, without sparsity; 0: unknown."""
    if device == "cpu" or precision == "fp32":
        return 0.0
    name = torch.cuda.get_device_name(device)
    padded = f" {' '.join(re.split('[^A-Za-z0-9]+', name))} "
    best = next((peak for part, peak in _PEAKS.items() if f" {part} " in padded), 0.0)
    return best / 2 if precision == "tf32" else best


def gpu_uuid(world: World) -> str:
    """Return the UUID of this rank's GPU; empty: it has none."""
    return str(torch.cuda.get_device_properties(world.device).uuid) if world.device != "cpu" else ""


def peak_of_all(world: World, precision: str) -> float:
    """Return the peak FLOP/s of all GPUs of a world together; 0: unknown.

    Every rank must call this.
    """
    texts = all_gather_texts(world, f"{gpu_uuid(world)} {peak_flops(world.device, precision)}")
    return sum_of_gpus(texts)


def sum_of_gpus(texts: Sequence[str]) -> float:
    """Return the sum over "UUID FLOP/s" texts, counting a shared GPU once; 0 if one is unknown.

    >>> sum_of_gpus(["a 3.0", "a 3.0", "b 4.0"]), sum_of_gpus(["a 3.0", " 0.0"]), sum_of_gpus(["a 3.0", "b 0.0"])
    (7.0, 0.0, 0.0)
    """
    peaks = {}
    for text in texts:
        uuid, _, peak = text.partition(" ")
        peaks[uuid] = float(peak)
    return sum(peaks.values()) if all(peaks.values()) else 0.0


def choose_backend(world: World, config: RunConfig, store: Board) -> str:
    """Return "nccl" if every rank has a different GPU, else "gloo". Every rank must call this."""
    if config.backend == "gloo":
        return "gloo"
    store.set(f"gpu-{world.rank}", gpu_uuid(world))
    uuids = [store.get(f"gpu-{rank}").decode() for rank in range(world.size)]
    own_gpu_each = all(uuids) and len(set(uuids)) == world.size
    if config.backend == "nccl" and all(uuids) and not own_gpu_each:
        let_nccl_share_a_gpu(world)
    if not own_gpu_each and config.backend == "auto":
        return "gloo"
    silence_nccl(config)
    return "nccl"


def silence_nccl(config: RunConfig) -> None:
    """Let the watchdog alone end a hang under NCCL, and say why: torch ends it later, with C++ stacks as its message."""
    if not config.timeout.hang_steps:
        return
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def let_nccl_share_a_gpu(world: World) -> None:
    """Let NCCL take every rank for a host of its own: otherwise it refuses ranks that share a GPU.

    They then talk over sockets, which shows that a program works, not how fast it is.
    """
    os.environ.setdefault("NCCL_HOSTID", f"paceline-rank-{world.rank}")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    if world.nodes == 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
