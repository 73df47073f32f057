"""Lesson 23: the same bits on any world: lanes, order, tree.

Lesson 8 came close to the curve of one device, but not to its bits. Three things depend on the number
of ranks: which samples form a step, which random numbers dropout draws, and the order in which
gradients are summed. Paceline fixes all three. A step is always cut into the same lanes
(micro-batches), which the ranks share; the k-th sample is a function of (seed, epoch, k); every lane
seeds its own generators; and lane gradients are summed along one fixed tree.

    python lessons/23_same_bits.py epochs=2 name=one
    paceline run -n 2 lessons/23_same_bits.py epochs=2 name=two
    torchrun --standalone --nproc-per-node 4 lessons/23_same_bits.py epochs=2 name=four
    paceline verify --worlds 1,3 --steps 5 lessons/23_same_bits.py

Expect: each run prints the same sixteen digits, a digest of weights and optimizer state, with dropout
on; verify prints `the same bits`.
Time: about 38 s on 2 cores.
New since lesson 6: `main` uses Paceline, which replaces `pick_device`, `join`, `share_of` and
`accuracy`; settings replace `EPOCHS`, `BATCH` and `RATE`; `make_model` has dropout.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

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


if __name__ == "__main__":
    main(paceline.config_from_argv())
