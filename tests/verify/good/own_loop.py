"""A hand-written loop over `paceline.Run`, with tokens of ragged length; the same in every world."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline

WORDS, LONGEST, PADDING = 11, 12, -100


def loss_and_count(scores: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    total = cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total, int((targets != PADDING).sum())


def main(config: paceline.RunConfig) -> None:
    with paceline.Run(config) as run:
        words, targets = torch.randint(WORDS, (64, LONGEST)), torch.randint(WORDS, (64, LONGEST))
        lengths = torch.arange(64) % LONGEST + 1
        targets = targets.masked_fill(torch.arange(LONGEST) >= lengths[:, None], PADDING)
        plain = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, WORDS))
        model = run.model(plain)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in run.steps((words, targets)):
            run.update(optimizer, lambda batch: loss_and_count(model(batch[0]), batch[1]), step)


if __name__ == "__main__":
    main(paceline.config_from_argv())
