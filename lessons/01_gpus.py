"""Lesson 1: the same on GPUs.

Each process takes a GPU of its own, the one of its local rank, and the sum goes from GPU to GPU by NCCL.
Where a machine has fewer GPUs than processes, all stay on the CPU, so this runs on a laptop as well.

    torchrun --standalone --nproc-per-node 4 lessons/01_gpus.py    as many as there are GPUs
    python lessons/01_gpus.py                                      alone

Expect: as in lesson 0, with the device of each rank.
Time: about 11 s on 2 cores.
Over several nodes: lesson 9.
New since lesson 0: `pick_device`, `join`, `main`.
"""

import os

import torch
import torch.distributed as dist


def pick_device() -> torch.device:
    """Return this process's own GPU, or the CPU if there are not enough of them."""
    local_rank, here = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if torch.cuda.device_count() < here:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # or what names no device would take GPU 0 in every process
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> tuple[int, int]:
    """Meet the other processes; return who we are, and how many. torchrun tells both through the environment."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    """Add up one number of each rank."""
    device = pick_device()
    rank, size = join(device)
    number = torch.tensor([float(rank)], device=device)
    dist.all_reduce(
        number
    )  # done when all have come here; a GPU waits for that, its program goes on
    print(f"rank {rank} of {size} had {rank}, and the sum is {number.item():.0f} on {device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
