"""Train an LSTM on packed sequences: no step is spent on padding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import paceline

Batch = tuple[PackedSequence, Tensor]


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "packed-lstm"


def walks(count: int, seed: int) -> list[tuple[Tensor, int]]:
    """Return random walks of different lengths, [length, 1], and whether each ends above 0."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (count,), generator=draw).tolist()
    steps = [torch.randn(length, 1, generator=draw) for length in lengths]
    return [(walk, int(walk.sum() > 0)) for walk in steps]


def pack(samples: list[tuple[Tensor, int]]) -> Batch:
    sequences, labels = zip(*samples, strict=True)
    return pack_sequence(list(sequences), enforce_sorted=False), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 24), nn.Linear(24, 2)

    def forward(self, sequences: PackedSequence) -> Tensor:
        scores: Tensor = self.head(self.lstm(sequences)[1][0][-1])  # of the last hidden state
        return scores


def main(config: Config) -> None:
    train, test = walks(1024, seed=1), walks(200, seed=2)
    with paceline.Run(config) as run:
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))

        def score(batch: Batch) -> dict[str, Tensor]:
            return {"acc": (model(batch[0]).argmax(1) == batch[1]).float()}

        for step in run.steps(train, collate=pack, epochs=5):
            run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)
            if step.ends_epoch:
                run.evaluate(test, score, collate=pack)


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
