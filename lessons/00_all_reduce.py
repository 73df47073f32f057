"""Lesson 0: An all-reduce on four processes.

Each process holds its own number. After all_reduce, every process holds the sum of all numbers.
Nearly all of distributed training is built on this one operation.

    torchrun --standalone --nproc-per-node 4 lessons/00_all_reduce.py    four processes
    python lessons/00_all_reduce.py                                      one process

Expect: ranks 0, 1, 2 and 3 each print their own number and the sum, 6. One process prints the sum 0.
Time: about 11 s on 2 cores.
Over several nodes: lesson 9.
"""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int]:
    """Join the process group; return rank and world size, which torchrun passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    """Sum one number per rank."""
    rank, size = join()
    number = torch.tensor([float(rank)])
    dist.all_reduce(number)  # returns when every rank has called it
    print(f"rank {rank} of {size} had {rank}, and the sum is {number.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
