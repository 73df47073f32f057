"""The mistake: sentences of different length; each rank takes the mean over its own tokens, DDP the mean of those means."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.train.observers.recorder import Recorder
from paceline.world.collectives import sum_across
from paceline.world.process_group import join

WORDS, LONGEST, SENTENCES, PADDING = 11, 12, 64, -100


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and the words to predict; what lies behind the end of a sentence does not count."""
    words, targets = (
        torch.randint(WORDS, (SENTENCES, LONGEST)),
        torch.randint(WORDS, (SENTENCES, LONGEST)),
    )
    lengths = torch.arange(SENTENCES) % LONGEST + 1
    return words, targets.masked_fill(torch.arange(LONGEST) >= lengths[:, None], PADDING)


def main(config: paceline.RunConfig) -> None:
    with join(config) as world:
        words, targets = sentences()
        plain = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
        model = DistributedDataParallel(plain) if world.size > 1 else plain
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder(config, world)
        recorder.start(plain, optimizer)
        for step, rows in enumerate(torch.arange(SENTENCES).split(8), start=1):
            mine = rows.chunk(world.size)[world.rank]
            loss = cross_entropy(
                model(words[mine]).flatten(0, 1), targets[mine].flatten(), ignore_index=PADDING
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = sum_across(world, loss.detach()) / world.size
            if recorder.step(step, float(mean), plain, optimizer, [(words[mine], targets[mine])]):
                break


if __name__ == "__main__":
    main(paceline.config_from_argv())
