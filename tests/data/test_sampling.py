"""Samplers, weights and mixtures: functions of (seed, epoch, k), the same in every world."""

from collections import Counter

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.sampled import by_length, mixture, weighted
from paceline.data.reading.source import as_source
from paceline.data.reading.transform import Transformed
from paceline.data.sampling import (
    ComposedOrder,
    LengthOrder,
    MixtureOrder,
    RepeatedOrder,
    SequentialOrder,
    SubsetOrder,
    UniformOrder,
    WeightedOnceOrder,
    WeightedOrder,
    uniform_at,
)
from paceline.errors import ConfigError
from paceline.world.world import World
from support.datasets import check_worlds, lanes_of, make_dataset, open_folder

WEIGHTS = [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]


def config(**settings):
    return RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5, **settings)


CONFIG = config()


ORDERS = [
    SequentialOrder(30),
    SubsetOrder([4, 8, 15, 16, 23, 42]),
    RepeatedOrder(7, 30),
    UniformOrder(7, 30),
    WeightedOrder(WEIGHTS, 30),
    WeightedOnceOrder(WEIGHTS, 4),
    MixtureOrder([3, 5], [1, 3], 30),
    ComposedOrder(UniformOrder(6, 30), SubsetOrder([4, 8, 15, 16, 23, 42])),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_the_kth_sample_depends_on_seed_epoch_and_k_alone(order):
    places = numpy.arange(order.size)
    epochs = [order.at(places, 1, epoch).tolist() for epoch in range(4)]
    for epoch in (3, 0, 2):
        backwards = order.at(places[::-1].copy(), 1, epoch)[::-1]
        assert backwards.tolist() == epochs[epoch]
        one = [int(order.at(numpy.array([place]), 1, epoch)[0]) for place in places]
        assert one == epochs[epoch]
        assert order.repeats or max(Counter(epochs[epoch]).values()) == 1
    if not isinstance(order, SequentialOrder):
        assert len({tuple(epoch) for epoch in epochs}) > 1
        others = [order.at(places, 2, epoch).tolist() for epoch in range(4)]
        assert others != epochs


def test_numbers_are_uniform_and_never_the_same():
    numbers = numpy.concatenate([uniform_at(numpy.arange(5000), 3, epoch) for epoch in range(2)])
    assert len(numpy.unique(numbers)) == 10_000
    shares = numpy.histogram(numbers, bins=10, range=(0, 1))[0] / 10_000
    assert abs(shares - 0.1).max() < 0.02


def test_permutations_follow_each_other():
    found = RepeatedOrder(7, 17).at(numpy.arange(17), 1, 0).tolist()
    assert sorted(found[:7]) == sorted(found[7:14]) == list(range(7))
    assert found[:7] != found[7:14]
    assert len(set(found[14:])) == 3


def test_draws_follow_the_weights():
    drawn = WeightedOrder(WEIGHTS, 20_000).at(numpy.arange(20_000), 1, 0)
    shares = numpy.bincount(drawn, minlength=6) / 20_000
    assert abs(shares - numpy.array(WEIGHTS) / 10).max() < 0.02
    assert shares[0] == shares[5] == 0


def test_draws_without_replacement_follow_the_weights():
    order = WeightedOnceOrder(WEIGHTS, 2)
    pairs = [order.at(numpy.arange(2), 1, epoch).tolist() for epoch in range(3000)]
    first = Counter(pair[0] for pair in pairs)
    second = Counter(pair[1] for pair in pairs)
    assert abs(first[4] / 3000 - 0.4) < 0.04
    wanted = sum(0.1 * w * 4 / (10 - w) for w in (1, 2, 3))
    assert abs(second[4] / 3000 - wanted) < 0.04


def test_a_mixture_takes_a_dataset_once_before_it_repeats_it():
    drawn = MixtureOrder([3, 50], [1, 3], 40).at(numpy.arange(40), 1, 0).tolist()
    small = [sample for sample in drawn if sample < 3]
    assert 3 < len(small) < 20
    for begin in range(0, len(small) - 2, 3):
        assert sorted(small[begin : begin + 3]) == [0, 1, 2]
    large = [sample for sample in drawn if sample >= 3]
    assert len(set(large)) == len(large)


class Noisy(Dataset):
    """A dataset whose samples are augmented at random."""

    def __init__(self, first=0, samples=6):
        self.first, self.samples = first, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, sample):
        return torch.tensor(self.first + sample), torch.rand(1)


TENSORS = torch.arange(6), torch.arange(6) * 10
DRAWN = {
    "weighted": lambda: weighted(Noisy(), WEIGHTS, samples=21),
    "weighted once": lambda: weighted(Noisy(), WEIGHTS, samples=3, replacement=False),
    "weighted tensors": lambda: weighted(TENSORS, torch.tensor(WEIGHTS), samples=21),
    "by length": lambda: by_length(Noisy(), range(len(WEIGHTS)), batch=2),
    "mixture": lambda: mixture({"a": Noisy(), "b": Noisy(100, 9)}, {"a": 1, "b": 2}, samples=21),
    "mixture of tensors": lambda: mixture({"a": TENSORS, "b": TENSORS}, {"a": 1, "b": 2}),
    "transformed": lambda: weighted(
        Transformed(as_source(TENSORS), lambda batch, rng: (batch[0], rng.uniform())), WEIGHTS
    ),
    "weighted mixture": lambda: weighted(
        mixture({"a": Noisy(0, 3), "b": Noisy(100, 3)}, {"a": 1, "b": 2}), WEIGHTS
    ),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_samples_are_the_same_in_every_world(kind):
    lanes = check_worlds(DRAWN[kind], CONFIG, start=1)
    if kind in ("weighted", "transformed"):  # one that is drawn twice is augmented twice
        noise = [str(value) for lane in lanes.values() for value in lane[1]]
        assert len(set(noise)) == len(noise)


@pytest.mark.parametrize("kind", ["mixture", "weighted mixture"])
def test_workers_do_not_change_what_is_drawn(kind):
    with_workers = config(read=ReadConfig(workers=2))
    assert lanes_of(DRAWN[kind](), with_workers) == lanes_of(DRAWN[kind](), CONFIG)


def test_weights_choose_among_the_samples_of_shards(tmp_path):
    shards = open_folder(make_dataset(tmp_path, 37, 5))
    weights = [float(sample % 2) for sample in range(37)]
    lanes = lanes_of(weighted(shards, weights), CONFIG)
    labels = [label for lane in lanes.values() for label in lane[1]]
    assert len(labels) == 74
    assert {label % 2 for label in labels} == {1}


@pytest.mark.parametrize(
    ("make", "problem", "fix"),
    [
        (lambda: weighted(Noisy(), [1.0]), "1 weights for 6", "one per sample"),
        (lambda: weighted(Noisy(), [1.0, -2, 1, 1, 1, 1]), "got -2.0 at index 1", "replace it"),
        (lambda: weighted(Noisy(), [1.0, float("nan"), 1, 1, 1, 1]), "got nan", "replace it"),
        (lambda: weighted(Noisy(), [0.0] * 6), "all weights are 0", "above 0"),
        (lambda: weighted(Noisy(), [[1.0]]), r"shape \[1, 1\]", "one weight per sample"),
        (lambda: weighted(Noisy(), WEIGHTS, samples=0), "got 0", "samples="),
        (lambda: weighted(Noisy(), WEIGHTS, replacement=False), "6 samples .* from 4", "4 or less"),
        (lambda: mixture({"a": Noisy()}, {"b": 1}), "'a' has the weights 'b'", "same names"),
        (lambda: mixture({}, {}), "none", "at least one"),
        (
            lambda: mixture({"a": Transformed(as_source(TENSORS), tuple)}, {"a": 1}),
            "'a' of the mixture",
            "each= instead",
        ),
    ],
)
def test_impossible_draws_are_refused(make, problem, fix):
    with pytest.raises(ConfigError, match=problem) as caught:
        make()
    assert fix in caught.value.fix


def test_draws_are_described():
    batches = Batches(DRAWN["weighted"](), config(), World())
    assert batches.description == "weighted: 21 of 6 samples per epoch, with replacement"
    batches = Batches(DRAWN["mixture"](), config(), World())
    assert batches.description == "mixture: 21 samples per epoch, a 33.3%, b 66.7%"
    assert (batches.plan.samples, batches.total_steps, batches.total_samples) == (21, 6, 42)


def test_batches_by_length_pad_little_and_hold_every_sample_once() -> None:
    lengths = numpy.random.default_rng(3).integers(1, 500, 1003)
    for batch, window in [(16, 50), (16, 3), (1, 4), (2000, 2)]:
        order = LengthOrder(lengths, batch, window).epoch(seed=5, epoch=1)
        assert sorted(order.tolist()) == list(range(1003))
    sorted_by = lengths[LengthOrder(lengths, 16, 50).epoch(seed=5, epoch=1)]
    drawn = lengths[LengthOrder(lengths, 16, 1).epoch(seed=5, epoch=1)]
    assert padding(sorted_by) < 0.1 * padding(drawn)
    steps = sorted_by[:992].reshape(-1, 16).mean(1)
    assert abs(numpy.corrcoef(numpy.arange(len(steps)), steps)[0, 1]) < 0.4, (
        "not from short to long"
    )


def padding(lengths: numpy.ndarray) -> int:
    rows = lengths[:992].reshape(-1, 16)
    return int((rows.max(1, keepdims=True) - rows).sum())


@pytest.mark.parametrize(
    ("lengths", "batch", "fix"), [([1, 2], 2, "pass 4 lengths"), ([1] * 4, 0, "global_size")]
)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], batch: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        by_length((torch.arange(4),), lengths, batch=batch)


def test_the_batch_of_by_length_is_that_of_the_run_or_is_refused() -> None:
    data = by_length([{"row": torch.zeros(2)} for _ in range(64)], range(64), batch=16)
    assert Batches(data, RunConfig(), World()).config.batch.global_size == 16
    given = RunConfig(batch=BatchConfig(global_size=32, lanes=2))
    assert Batches(data, given, World()).config.batch.global_size == 32
    with pytest.raises(ConfigError, match="16 samples, and a step has 24"):
        Batches(data, RunConfig(batch=BatchConfig(global_size=24, lanes=2)), World())
