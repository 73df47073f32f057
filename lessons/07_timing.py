"""Lesson 7: Measure the speed-up.

A speed-up compares two times of the same work, so the global batch stays the same. Warm-up is not
counted. A GPU works asynchronously, so the program must wait for it before it reads the clock:
`loss.item()` does that in every step. On a machine with fewer GPUs than ranks, hide them all
(`CUDA_VISIBLE_DEVICES=`); otherwise you compare a GPU with CPU cores.

    python lessons/07_timing.py 1 2    sizes that divide 64; the first one is the reference

Expect: well below 2 on two cores: the model is small, and ranks wait for each other in every step.
`paceline scale --worlds 1,2,4 SCRIPT` repeats it in rounds, and says what the ranks waited for.
Time: about 19 s on 2 cores.
New since lesson 6: `train` is the old `main` with a clock; `main` starts it at every size; there is
no `accuracy`.
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

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05


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


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return the samples of this rank in an epoch: every size-th of one shuffled order."""
    generator = torch.Generator().manual_seed(epoch)  # a new order in every epoch
    order = torch.randperm(samples, generator=generator)
    complete = samples - samples % BATCH  # a mean of means needs equal parts
    return order[rank:complete:size]


def train() -> None:
    """Train, and print the time it took."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), _ = embedded_digits()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        if epoch == 1:
            begun = time.perf_counter()  # the first epoch warms up
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
    reference = 0.0
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # or one rank would use all cores
    for size in sys.argv[1:] or ["1", "2"]:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*agent, "--nproc-per-node", size, __file__]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=one_thread
        )
        line = done.stdout.strip()
        seconds = float(line.split(": ")[1].split(" s")[0])
        reference = reference or seconds
        print(f"{line}, speed-up {reference / seconds:.2f}")


if __name__ == "__main__":
    main()
