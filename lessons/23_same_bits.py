"""Lesson 23: The same bits on any world.

Lesson 8 came close to the curve of one device, but not to its bits. Three things depend on the number
of ranks: which samples form a step, which random numbers dropout draws, and the order in which
gradients are summed. Paceline fixes all three. A step is always cut into the same lanes
(micro-batches), which the ranks share; the k-th sample is a function of (seed, epoch, k); every lane
seeds its own generators; and lane gradients are summed along one fixed tree.

    torchrun --standalone --nproc-per-node 1 lessons/23_same_bits.py plain
    torchrun --standalone --nproc-per-node 2 lessons/23_same_bits.py plain                                              another digest
    python lessons/23_same_bits.py epochs=3 lr.base=0.05 batch.global_size=64 name=one
    paceline run -n 2 lessons/23_same_bits.py epochs=3 lr.base=0.05 batch.global_size=64 name=two                       the same digest
    torchrun --standalone --nproc-per-node 4 lessons/23_same_bits.py epochs=3 lr.base=0.05 batch.global_size=64 name=four    the same digest
    paceline verify --worlds 1,3 --steps 5 lessons/23_same_bits.py

Expect: plain DDP learns as well, and prints another digest of its weights on two ranks than on one.
Each run with Paceline reaches an accuracy above 0.9 with dropout on, and prints the same sixteen
digits, a digest of weights and optimizer state; verify prints `the same bits`.
Time: about 55 s on 2 cores.
New since lesson 6: `main` uses Paceline, which replaces `pick_device`, `join`, `share_of` and
`accuracy`; settings replace `EPOCHS`, `BATCH` and `RATE`; `make_model` has dropout; `plain_ddp` is
lesson 6 without Paceline, for comparison.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def main(config: paceline.RunConfig) -> None:
    """Train."""
    train, held_out = embedded_digits()
    with paceline.Run(config) as run:  # joins the ranks, restores, saves, stops
        model = run.model(make_model())  # the same object, on this rank's device
        sgd = torch.optim.SGD(model.parameters(), lr=paceline.scaled_lr(config), momentum=0.9)
        optimizer = run.optimizer(sgd)
        metrics = {"acc": paceline.accuracy}
        paceline.Trainer(
            run, model, optimizer, train, cross_entropy, evaluation=held_out, metrics=metrics
        ).fit()


def plain_ddp() -> None:
    """Train with DDP alone, as in lesson 6; print a digest of the weights."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    (images, labels), held_out = embedded_digits()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        complete = len(order) - len(order) % 64
        for batch in order[rank:complete:size].split(64 // size):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    acc = (model.eval()(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    if rank == 0:
        digest = hashlib.sha256(weights).hexdigest()[:16]
        print(f"plain DDP, world size {size}: acc {acc:.4f}, weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    plain_ddp() if "plain" in sys.argv else main(paceline.config_from_argv())
