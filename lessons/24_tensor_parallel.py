"""Lesson 24: Tensor parallelism by hand.

Data parallelism needs the whole model on every rank. Tensor parallelism cuts the matrices instead, and
all ranks work on the same samples. Of an MLP, y = relu(xA)B, each rank holds some columns of A and the
same rows of B: it computes its part of the hidden layer alone, and a part of the sum y. One all-reduce
in forward completes y; another one in backward completes the gradient of x.

    torchrun --standalone --nproc-per-node 2 lessons/24_tensor_parallel.py    two ranks, half of the MLP each
    python lessons/24_tensor_parallel.py                                      one: the same losses

Expect: half of the parameters of the MLP on each of two ranks, and the losses of one process, on every
rank, up to rounding: the sum y is added in another order. Any number of ranks that divides 128 works.
A transformer cuts its attention by heads. All wait for each other in every layer: use it in one node.
Time: about 12 s on 2 cores.
New since lesson 4: `Spread`, `Collect` and `Mlp` with its size `HIDDEN`, in `make_model`. In `main` all
ranks use all samples, and nothing is averaged: `average_gradients` is gone.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE, HIDDEN = 3, 64, 0.05, 128


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


class Spread(torch.autograd.Function):
    """Before the first matrix: x is on all ranks; in backward, each rank has a part of its gradient."""

    @staticmethod
    def forward(_: FunctionCtx, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: FunctionCtx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Collect(torch.autograd.Function):
    """After the second matrix: each rank has a part of the sum y; its gradient is on all ranks."""

    @staticmethod
    def forward(_: FunctionCtx, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(_: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class Mlp(nn.Module):
    """A rank's part of a linear layer, relu, and a linear layer."""

    def __init__(self, inputs: int, outputs: int, rank: int, size: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, outputs)  # the same on every rank
        self.a, self.b = nn.Linear(inputs, HIDDEN // size), nn.Linear(HIDDEN // size, outputs)
        with torch.no_grad():  # torch stores a matrix transposed: the columns of A are rows here
            self.a.weight.copy_(whole[0].weight.chunk(size)[rank])
            self.a.bias.copy_(whole[0].bias.chunk(size)[rank])
            self.b.weight.copy_(whole[1].weight.chunk(size, dim=1)[rank])
            self.b.bias.copy_(whole[1].bias)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.a(Spread.apply(values)).relu()
        return Collect.apply(hidden @ self.b.weight.T) + self.b.bias  # the bias is added once


def make_model(rank: int, size: int) -> nn.Module:
    """Return a small network: a convolution, whole on every rank, and a rank's part of an MLP."""
    convolution = nn.Conv2d(1, 8, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), Mlp(8 * 14 * 14, 10, rank, size))


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
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), held_out = embedded_digits()
    model = make_model(rank, size).to(device)
    print(f"rank {rank} of {size}: {sum(one.numel() for one in model.parameters()):,} parameters")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        total, mine = 0.0, share_of(0, 1, len(images), epoch)  # all samples, on every rank
        for batch in mine.split(BATCH):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"rank {rank}, epoch {epoch + 1}: {len(mine)} samples, loss {total / len(mine):.4f}")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"rank {rank}: accuracy {accuracy(model, test_images, test_labels):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
