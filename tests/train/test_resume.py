"""Resuming costs no reading through data: only the samples of the steps that are left are ever asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.config import RunConfig, config_from_words


class Counted(torch.utils.data.Dataset):
    """A dataset that remembers which samples were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(number)
        return torch.full((4,), float(number)), torch.zeros(1)


def train(folder: Path, steps: int) -> list[int]:
    config = config_from_words(
        RunConfig, [f"runs={folder}", f"steps={steps}", "batch.global_size=8", "checkpoint.every=end", "lr.base=1e-5"]
    )
    data = Counted()
    with paceline.join(config) as world:
        model = nn.Linear(4, 1)
        batches = paceline.Batches(data, config, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=paceline.scaled_lr(config))
        data.asked.clear()  # the source looks at one sample to learn its shape
        paceline.Trainer(world, model, optimizer, batches, nn.functional.mse_loss, config).run()
    return data.asked


@pytest.mark.parametrize("seen", [1, 20, 503])
def test_only_what_is_left_is_read(tmp_path: Path, seen: int) -> None:
    first = train(tmp_path, seen)
    assert len(first) == 8 * seen
    assert len(train(tmp_path, seen + 3)) == 8 * 3
    assert train(tmp_path, seen + 3) == [], "a run that is complete reads nothing"
