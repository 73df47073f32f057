"""Lesson 0: four processes, one all_reduce.

Every process has a number of its own. After all_reduce, every process has the sum of all of them.
Nearly all of distributed training is this one act.

    torchrun --standalone --nproc-per-node 4 lessons/00_all_reduce.py    four processes
    python lessons/00_all_reduce.py                                      alone

Expect: each of the ranks 0, 1, 2, 3 says which number it had, and that the sum is 6. Alone, the sum is 0.
Time: about 11 s on 2 cores.
Over several nodes: lesson 9.
"""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int]:
    """Meet the other processes; return who we are, and how many. torchrun tells both through the environment."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    """Add up one number of each rank."""
    rank, size = join()
    number = torch.tensor([float(rank)])
    dist.all_reduce(number)  # nobody goes on before all have come here
    print(f"rank {rank} of {size} had {rank}, and the sum is {number.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
