"""Lesson 9: An all-reduce over nodes.

The program does not know about nodes: an agent on each node starts its processes, and all agents
meet at one address. Type the same command on every node, with the first node's name for HOST. Two
agents on one machine work too, with 127.0.0.1 for HOST and without GPUs (`CUDA_VISIBLE_DEVICES=`),
because both would use the same ones: `paceline lesson 9` does that.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 lessons/09_all_reduce_nodes.py

Expect: four ranks, two on each node, and the sum 6 on all of them. If it hangs, the nodes do not
reach each other: `paceline doctor --nodes HOST,OTHER`, typed on both, says why.
Time: about 10 s on 2 cores.
New since lesson 1: `main` prints its node, and times a larger sum: between nodes it is slower.
"""

import os
import time

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
    """Sum one number per rank, then a million numbers."""
    device = pick_device()
    rank, size = join(device)
    node = os.environ.get("GROUP_RANK", "0")
    number = torch.tensor([float(rank)], device=device)
    dist.all_reduce(number)  # the GPU waits for all ranks; the Python program continues
    print(
        f"rank {rank} of {size} had {rank}, and the sum is {number.item():.0f} on {device} of node {node}"
    )
    million = torch.ones(1_000_000, device=device)
    dist.all_reduce(million)
    begun = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(million)
    million.sum().item()  # a GPU works asynchronously
    if rank == 0:
        print(
            f"a sum of 4 MB takes {(time.perf_counter() - begun) / 5 * 1e3:.1f} ms over {size} ranks"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
