"""Lesson 1: An all-reduce on GPUs.

Each process uses the GPU of its local rank, and NCCL carries the sum from GPU to GPU. If a machine
has fewer GPUs than processes, all processes stay on the CPU, so this runs on a laptop as well.

    torchrun --standalone --nproc-per-node 4 lessons/01_gpus.py    as many as there are GPUs
    python lessons/01_gpus.py                                      one process

Expect: the output of lesson 0, with the device of each rank.
Time: about 11 s on 2 cores.
Over several nodes: lesson 9.
New since lesson 0: `pick_device`, `join`, `main`.
"""

import os

import torch
import torch.distributed as dist


def pick_device() -> torch.device:
    """Return the GPU of this local rank, or the CPU if there are not enough GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # "cuda" without a number would be GPU 0 everywhere
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> tuple[int, int]:
    """Join the process group; return rank and world size, which torchrun passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    """Sum one number per rank."""
    device = pick_device()
    rank, size = join(device)
    number = torch.tensor([float(rank)], device=device)
    dist.all_reduce(number)  # the GPU waits for all ranks; the Python program continues
    print(f"rank {rank} of {size} had {rank}, and the sum is {number.item():.0f} on {device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
