"""Lesson 8: Learning rate and batch size.

Most people first keep the batch size per rank. Then four ranks use four times as many samples per
step and take a quarter of the steps: another training, with another curve. Either scale the
learning rate with the batch (still another training, which often gets as far in fewer steps), or
keep the global batch: the same training, spread over ranks.

    python lessons/08_rate_and_batch.py                                                the reference
    torchrun --standalone --nproc-per-node 4 lessons/08_rate_and_batch.py              falls behind
    torchrun --standalone --nproc-per-node 4 lessons/08_rate_and_batch.py scale-rate   closer
    torchrun --standalone --nproc-per-node 4 lessons/08_rate_and_batch.py keep-batch   the same curve

Expect: with keep-batch, the losses of one process to three digits. The same samples form a batch,
but the order in which they are summed differs. Lesson 23 makes the last bit equal.
Time: about 50 s on 2 cores.
New since lesson 6: `main` takes both options and prints the loss over all ranks; a smaller `BATCH`,
and a `RATE` for it.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 16, 0.003


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


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of digits that the model classifies correctly."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return the samples of this rank in an epoch: every size-th of one shuffled order."""
    generator = torch.Generator().manual_seed(epoch)  # a new order in every epoch
    order = torch.randperm(samples, generator=generator)
    complete = samples - samples % BATCH  # a mean of means needs equal parts
    return order[rank:complete:size]


def main() -> None:
    """Train."""
    keep_batch, scale_rate = "keep-batch" in sys.argv, "scale-rate" in sys.argv
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), held_out = embedded_digits()
    model = DistributedDataParallel(make_model().to(device))
    each = BATCH // size if keep_batch else BATCH
    rate = RATE * each * size / BATCH if scale_rate else RATE
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for epoch in range(EPOCHS):
        total, mine = 0.0, share_of(rank, size, len(images), epoch)
        for batch in mine.split(each):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        mean = torch.tensor([total / len(mine) / size], device=device)
        dist.all_reduce(mean)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: batch {each * size}, rate {rate:.3f}, loss of all ranks {mean.item():.4f}"
            )
    test_images, test_labels = (part.to(device) for part in held_out)
    if rank == 0:  # unwrapped: DDP's forward may wait for other ranks
        print(f"accuracy {accuracy(model.module, test_images, test_labels):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
