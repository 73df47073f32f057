"""The order is a permutation, different in each epoch, fair enough, and starts anywhere at once."""

import tracemalloc
from collections import Counter

import numpy
import pytest

from paceline.data.order import samples_at


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 1000, 4097])
def test_every_place_has_its_own_sample(size):
    order = samples_at(numpy.arange(size), size, seed=9, epoch=2)
    assert sorted(order.tolist()) == list(range(size))


def test_any_part_of_the_order_is_found_without_the_rest():
    whole = samples_at(numpy.arange(1000), 1000, seed=1, epoch=0)
    assert samples_at(numpy.arange(700, 710), 1000, seed=1, epoch=0).tolist() == whole[700:710].tolist()


def test_a_set_of_a_trillion_samples_needs_no_memory():
    tracemalloc.start()
    found = samples_at(numpy.arange(10**12 - 256, 10**12), 10**12, seed=1, epoch=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found.tolist())) == 256
    assert peak < 1_000_000


def test_epochs_and_seeds_differ():
    orders = {tuple(samples_at(numpy.arange(50), 50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_every_sample_comes_at_every_place_about_equally_often():
    size, epochs = 10, 4000
    counts = numpy.zeros((size, size))
    for epoch in range(epochs):
        counts[numpy.arange(size), samples_at(numpy.arange(size), size, 0, epoch)] += 1
    expected = epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * (2 * 81) ** 0.5  # 81 degrees of freedom, five standard deviations


def test_neighbours_are_as_good_as_random():
    pairs = Counter()
    for epoch in range(3000):
        order = samples_at(numpy.arange(6), 6, 0, epoch)
        pairs.update(zip(order[:-1].tolist(), order[1:].tolist(), strict=True))
    counts = numpy.array(list(pairs.values()))
    assert len(counts) == 30
    assert ((counts - 500) ** 2 / 500).sum() < 29 + 5 * (2 * 29) ** 0.5


def test_the_order_is_the_one_of_the_first_release():
    assert samples_at(numpy.arange(8), 1000, seed=42, epoch=1).tolist() == [921, 960, 327, 861, 86, 378, 38, 313]
