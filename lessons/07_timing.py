"""Lesson 7: timing: the world sizes are the argument, and the speed-up is printed.

A speed-up is a ratio of two times of the same work, so the batch of all ranks together stays the same.
What warms up is left out. A GPU works behind the program's back, and is waited for before the clock is
read: `loss.item()` does that in every step. On a machine with fewer GPUs than ranks hide them all
(`CUDA_VISIBLE_DEVICES=`), or a GPU is compared with cores.

    python lessons/07_timing.py 1 2    sizes that divide 64; the first is what the others are compared with

Expect: well below 2 on two cores: the model is small, and ranks wait for each other in every step.
`paceline scale SCRIPT --worlds 1,2,4` repeats it in rounds, and says what was waited for.
Time: about 19 s on 2 cores.
New since lesson 6: `train` is the old `main` with a clock; `main` starts it at every size; `accuracy` is not asked for.
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.recipes.digits import (
    embedded_digits,
)  # 1,797 digits that come with the package: nothing to download

EPOCHS, BATCH, RATE = 3, 64, 0.05


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


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return which samples this rank takes in an epoch: every size-th of an order that all ranks draw alike."""
    order = torch.randperm(
        samples, generator=torch.Generator().manual_seed(epoch)
    )  # a new one in every epoch
    return order[
        rank : samples - samples % BATCH : size
    ]  # whole batches: a mean of means needs equal parts


def train() -> None:
    """Train, and say how long it took."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same first weights everywhere
    (images, labels), _ = embedded_digits()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        if epoch == 1:
            begun = time.perf_counter()  # in the first epoch everything is still cold
        total, mine = 0.0, share_of(rank, size, len(images), epoch)
        for batch in mine.split(BATCH // size):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
    if rank == 0:
        print(f"ranks {size}: {time.perf_counter() - begun:.3f} s, loss {total / len(mine):.4f}")
    dist.destroy_process_group()


def main() -> None:
    """Run this file once for every world size given, and compare."""
    if "RANK" in os.environ:
        train()
        return
    first, one_thread = (
        0.0,
        os.environ | {"OMP_NUM_THREADS": "1"},
    )  # or one rank alone would take all cores
    for size in sys.argv[1:] or ["1", "2"]:
        agent = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            size,
            __file__,
        ]
        said = subprocess.run(
            agent, check=True, stdout=subprocess.PIPE, text=True, env=one_thread
        ).stdout.strip()
        seconds = float(said.split(": ")[1].split(" s")[0])
        first = first or seconds
        print(f"{said}, speed-up {first / seconds:.2f}")


if __name__ == "__main__":
    main()
