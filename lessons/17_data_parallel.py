"""Lesson 17: DataParallel against DistributedDataParallel.

DataParallel is one process with many threads: in every step it copies the model to all GPUs, cuts the
batch, and brings the outputs back to the first one, all under one interpreter. DDP has a process for each
GPU, and only gradients travel. There is no reason left to use the former.

    python lessons/17_data_parallel.py dp                                    one process for all GPUs
    torchrun --standalone --nproc-per-node 2 lessons/17_data_parallel.py     one for each

Expect: on two GPUs or more, the second is faster, and the more so the more there are. Without a GPU,
DataParallel just calls the model, and both take about as long.
Time: about 14 s on 2 cores.
New since lesson 6: the choice of the wrapper in `main`, and a clock.
"""

import os
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


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of digits that the model reads right."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return which samples this rank takes in an epoch: every size-th of an order that all ranks draw alike."""
    order = torch.randperm(
        samples, generator=torch.Generator().manual_seed(epoch)
    )  # a new one in every epoch
    return order[
        rank : samples - samples % BATCH : size
    ]  # whole batches: a mean of means needs equal parts


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same first weights everywhere
    (images, labels), held_out = embedded_digits()
    wrap = nn.DataParallel if "dp" in sys.argv else DistributedDataParallel
    model = wrap(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    torch.set_num_threads(1)  # for both, or the one process would take all cores
    begun = time.perf_counter()
    for epoch in range(EPOCHS):
        total, mine = 0.0, share_of(rank, size, len(images), epoch)
        for batch in mine.split(BATCH // size):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"rank {rank}, epoch {epoch + 1}: {len(mine)} samples, loss {total / len(mine):.4f}")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"rank {rank}: {time.perf_counter() - begun:.2f} s with {wrap.__name__}")
    print(f"rank {rank}: accuracy {accuracy(model, test_images, test_labels):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
