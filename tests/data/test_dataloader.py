"""A torch DataLoader, taken over as it is: the same lanes in every world, and a line that says how."""

import random
from dataclasses import replace

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.source import TensorSource, as_source
from paceline.errors import ConfigError
from paceline.world.world import World
from support.datasets import check_worlds, lanes_of

CONFIG = RunConfig(epochs=2, seed=5, batch=BatchConfig(lanes=4))


class Numbers(Dataset):
    """Samples of varying content, augmented at random."""

    def __len__(self):
        return 21

    def __getitem__(self, sample):
        return {"number": sample, "noise": float(torch.rand(1))}


class OwnSampler(Sampler):
    """A sampler that draws from every generator there is, and knows the epoch."""

    epoch = None

    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        own = torch.randint(21, (4,), generator=self.generator).tolist()
        theirs = torch.randint(21, (3,)).tolist()
        yield from [self.epoch, *own, *theirs]
        yield from numpy.random.randint(21, size=3).tolist()  # noqa: NPY002
        yield random.randrange(21)


def epochs_of(data):
    """Return the sample numbers of the two epochs."""
    lanes, steps = lanes_of(data, CONFIG), Batches(data, CONFIG, World()).plan.steps_per_epoch
    epochs = [[], []]
    for (step, _), batch in sorted(lanes.items()):
        epochs[step // steps] += batch["number"]
    return epochs


WEIGHTS = torch.arange(21.0)
SAMPLERS = {
    "sequential": lambda: SequentialSampler(Numbers()),
    "random": lambda: RandomSampler(Numbers()),
    "some": lambda: RandomSampler(Numbers(), num_samples=12),
    "more": lambda: RandomSampler(Numbers(), num_samples=30),
    "replaced": lambda: RandomSampler(Numbers(), replacement=True, num_samples=30),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 30),
    "weighted once": lambda: WeightedRandomSampler(WEIGHTS, 12, replacement=False),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
    "own": OwnSampler,
    "distributed": lambda: DistributedSampler(Numbers(), num_replicas=2, rank=1),
}


def loader(kind="random", **settings):
    return DataLoader(Numbers(), batch_size=8, sampler=SAMPLERS[kind](), **settings)


@pytest.mark.parametrize(
    ("kind", "count", "once"),
    [
        ("sequential", 21, True),
        ("random", 21, True),
        ("some", 12, True),
        ("more", 30, False),
        ("replaced", 30, False),
        ("weighted", 30, False),
        ("weighted once", 12, True),
        ("subset", 5, True),
        ("own", 12, False),
        ("distributed", 21, True),
    ],
)
def test_a_sampler_gives_its_samples_alike_in_every_world(kind, count, once):
    check_worlds(lambda: loader(kind), CONFIG, start=1)
    first, second = epochs_of(loader(kind))
    assert len(first) == len(second) == count
    assert (first == second) == (kind == "sequential")
    assert (len(set(first)) == count) == once


def test_samplers_give_what_they_promise():
    assert epochs_of(loader("sequential"))[0] == list(range(21))
    assert set(epochs_of(loader("subset"))[1]) == {1, 3, 5, 7, 9}
    assert 0 not in sum(epochs_of(loader("weighted")), [])  # noqa: RUF017
    assert sorted(epochs_of(loader("more"))[0][:21]) == list(range(21))
    assert [epoch[0] for epoch in epochs_of(loader("own"))] == [0, 1]


def triple(samples):
    return {"number": torch.tensor([3 * one["number"] for one in samples])}


def test_the_collate_fn_and_the_workers_are_taken(tmp_path):
    def touch(number):
        (tmp_path / str(number)).touch()

    data = loader("weighted", collate_fn=triple, num_workers=2, worker_init_fn=touch)
    assert Batches(data, CONFIG, World()).config.read.workers == 2
    assert epochs_of(data)[0] == [3 * number for number in epochs_of(loader("weighted"))[0]]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_tensors_of_a_loader_stay_in_memory():
    dataset = TensorDataset(torch.arange(21), torch.arange(21))
    shuffled = DataLoader(dataset, batch_size=8, shuffle=True)
    assert isinstance(as_source(shuffled), TensorSource)
    config = replace(CONFIG, batch=BatchConfig(global_size=8))
    assert lanes_of(shuffled, CONFIG) == lanes_of(dataset, config)


def test_the_batch_size_is_the_global_batch():
    batches = Batches(loader("random"), CONFIG, World())
    assert (batches.plan.global_size, batches.total_steps) == (8, 6)
    other = RunConfig(batch=BatchConfig(global_size=12), epochs=1)
    assert Batches(loader("random"), other, World()).plan.global_size == 12


def test_drop_last_leaves_out_the_short_step():
    batches = Batches(loader("random", drop_last=True), CONFIG, World())
    assert [step.plan.samples for step in batches.steps()] == [8, 8, 8, 8]
    first, second = epochs_of(loader("random", drop_last=True))
    assert set(first) != set(second)


def test_one_line_says_what_became_of_each_setting():
    data = loader("sequential", drop_last=True, num_workers=2, collate_fn=triple)
    config = RunConfig(batch=BatchConfig(global_size=16), read=ReadConfig(workers=1))
    (line,) = Batches(data, config, World()).description.splitlines()
    told = ["batch.global_size=16", "batch_size=8", "SequentialSampler", "1 worker", "drop_last"]
    assert [words for words in [*told, "collate_fn"] if words not in line] == []


def test_an_argument_beats_the_loader():
    batches = Batches(loader(collate_fn=triple), CONFIG, World(), collate=default_collate)
    assert "collate= replaces collate_fn" in batches.description
    assert "noise" in next(batches.steps()).lanes[0].batch


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


class Unsized:
    def __iter__(self):
        yield 1


class Growing(OwnSampler):
    def __iter__(self):
        return iter(range(12 + self.epoch))


class Odd(OwnSampler):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Stateful(OwnSampler):
    """A sampler that goes on drawing where it was."""

    def __init__(self):
        self.rng = numpy.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.integers(21, size=12).tolist())


class OwnBatches(BatchSampler):
    pass


def refused(sampler=None, batch_size=8, **settings):
    return lambda: DataLoader(Numbers(), batch_size, sampler=sampler, **settings)


@pytest.mark.parametrize(
    ("make", "problem", "fix"),
    [
        (lambda: DataLoader(Endless(), batch_size=8), "Endless", "Stream("),
        (
            refused(batch_size=1, batch_sampler=OwnBatches(SequentialSampler(Numbers()), 4, False)),
            "OwnBatches",
            "batch_sampler",
        ),
        (refused(batch_size=None), "batch_size", "batch_size="),
        (refused(Unsized()), "__len__", "__len__"),
        (refused(Growing()), "13 samples in epoch 1.*12", "same number"),
        (refused(Stateful()), "Stateful.*epoch 0", "default generator"),
        (refused(Odd([21] * 12)), "21 to 21.*21", "0 to 20"),
        (refused(Odd([[1, 2]] * 12)), r"\[1, 2\]", "one int per sample"),
        (refused(batch_size=30, drop_last=True), "21 samples", "drop_last=False"),
        (refused(WeightedRandomSampler(torch.ones(22), 5)), "22 weights for 21", "one weight"),
        (refused(batch_size=2), "batch.lanes=4", "batch.lanes=2"),
    ],
)
def test_loaders_that_cannot_be_taken_over_are_refused(make, problem, fix):
    with pytest.raises(ConfigError, match=problem) as caught:
        lanes_of(make(), CONFIG)
    assert fix in caught.value.fix
