"""Batches: the same samples for every world, from any step on, from whatever the user has."""

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.config import BatchConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.errors import ConfigError
from paceline.world.world import World


def config(samples_per_step=8, lanes=4, **settings):
    return RunConfig(batch=BatchConfig(global_size=samples_per_step, lanes=lanes), **settings)


def rows(batches, start=0):
    return [
        [lane.batch[0].flatten().tolist() for lane in step.lanes if lane.samples]
        for step in batches.steps(start)
    ]


NUMBERS = torch.arange(37.0).unsqueeze(1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_worlds_together_read_what_one_rank_reads(size):
    alone = rows(Batches((NUMBERS, NUMBERS), config(epochs=2), World()))
    parts = [
        rows(Batches((NUMBERS, NUMBERS), config(epochs=2), World(rank=rank, size=size)))
        for rank in range(size)
    ]
    assert [sum((part[step] for part in parts), []) for step in range(len(alone))] == alone  # noqa: RUF017


def test_a_run_can_be_entered_at_any_step():
    batches = Batches((NUMBERS, NUMBERS), config(epochs=3), World())
    assert rows(batches, start=7) == rows(batches)[7:]


class Noisy(Dataset):
    """A dataset whose samples are augmented at random."""

    def __len__(self):
        return 10

    def __getitem__(self, sample):
        return torch.tensor([float(sample)]) + torch.rand(1), torch.tensor(sample)


def test_random_transforms_are_keyed_by_the_sample():
    once, again = (rows(Batches(Noisy(), config(4, lanes=2, epochs=1), World())) for _ in range(2))
    others = [
        rows(Batches(Noisy(), config(4, lanes=2, epochs=1), World(rank=rank, size=2)))
        for rank in range(2)
    ]
    assert once == again == [one + two for one, two in zip(*others, strict=True)]


@pytest.mark.parametrize(
    "data", [(NUMBERS, NUMBERS), [NUMBERS, NUMBERS], TensorDataset(NUMBERS, NUMBERS)]
)
def test_tensors_come_in_several_dresses(data):
    assert rows(Batches(data, config(), World())) == rows(
        Batches((NUMBERS, NUMBERS), config(), World())
    )


class Half:
    """A source that says too little."""

    def gather(self, samples, key):
        return (torch.from_numpy(samples),)


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ((torch.empty(0, 3), torch.empty(0)), "check the path or the filter"),
        ((torch.empty(3), torch.empty(2)), "equal length"),
        (object(), "__getitem__"),
        (Half(), "block = window = 0"),
        ({"image": NUMBERS, "label": NUMBERS[1:]}, "the same length"),
        ([{"image": 1}, {"label": 2}] * 8, "pass collate="),
    ],
)
def test_what_cannot_be_a_training_set_is_refused(data, fix):
    with pytest.raises(ConfigError, match=fix):
        next(Batches(data, config(), World()).steps())


def test_steps_instead_of_epochs():
    batches = Batches((NUMBERS, NUMBERS), config(steps=7), World())
    assert batches.total_steps == 7
    assert batches.total_samples == 37 + 16
    assert [step.plan.samples for step in batches.steps()] == [8, 8, 8, 8, 5, 8, 8]
    assert numpy.isclose(sum(len(row) for step in rows(batches) for row in step), 53)
