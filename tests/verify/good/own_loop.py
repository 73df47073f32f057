"""A hand-written loop around `paceline.OptimizerStep`, with tokens of ragged length; the same in every world."""

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
    with paceline.join(config) as world:
        words, targets = torch.randint(WORDS, (64, LONGEST)), torch.randint(WORDS, (64, LONGEST))
        lengths = torch.arange(64) % LONGEST + 1
        targets = targets.masked_fill(torch.arange(LONGEST) >= lengths[:, None], PADDING)
        plain = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.2), nn.Linear(8, WORDS))
        model = paceline.parallelize(plain, world, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        take = paceline.OptimizerStep(world, model, optimizer, loss_and_count, config)
        recorder = paceline.Recorder(config, world)
        recorder.start(model, optimizer)
        for step in paceline.Batches((words, targets), config, world).steps():
            result = take(step)
            total = take.total(result)
            if recorder.step(
                step.plan.index + 1,
                total.loss / total.counted,
                model,
                optimizer,
                [lane.batch for lane in step.lanes],
            ):
                break


if __name__ == "__main__":
    main(paceline.config_from_argv())
