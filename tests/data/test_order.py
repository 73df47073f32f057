"""The order is a permutation, different in each epoch, fair enough, and starts anywhere at once."""

import tracemalloc
from collections import Counter

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import Order, places_of, samples_at


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 63, 64, 65, 4097])
def test_every_place_has_its_own_sample(size):
    order = samples_at(numpy.arange(size), size, seed=9, epoch=2)
    assert sorted(order.tolist()) == list(range(size))
    part = numpy.arange(size // 2, size)  # is found without the rest
    assert (samples_at(part, size, seed=9, epoch=2) == order[size // 2 :]).all()


def test_a_set_of_a_trillion_samples_needs_no_memory():
    tracemalloc.start()
    found = samples_at(numpy.arange(10**12 - 256, 10**12), 10**12, seed=1, epoch=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found.tolist())) == 256
    assert peak < 1_000_000


def test_epochs_and_seeds_differ():
    orders = {
        tuple(samples_at(numpy.arange(50), 50, seed, epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_every_sample_comes_at_every_place_about_equally_often():
    size, epochs = 10, 1500
    counts = numpy.zeros((size, size))
    for epoch in range(epochs):
        counts[numpy.arange(size), samples_at(numpy.arange(size), size, 0, epoch)] += 1
    expected = epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * (2 * 81) ** 0.5  # 81 degrees of freedom, five standard deviations


def test_neighbours_are_as_good_as_random():
    pairs = Counter()
    for epoch in range(1200):
        order = samples_at(numpy.arange(6), 6, 0, epoch)
        pairs.update(zip(order[:-1].tolist(), order[1:].tolist(), strict=True))
    counts = numpy.array(list(pairs.values()))
    assert len(counts) == 30
    assert ((counts - 200) ** 2 / 200).sum() < 29 + 5 * (2 * 29) ** 0.5


def test_the_order_is_the_one_of_the_first_release():
    first = samples_at(numpy.arange(8), 1000, seed=42, epoch=1).tolist()
    assert first == [921, 960, 327, 861, 86, 378, 38, 313]


@given(st.integers(1, 2**40), st.integers(0, 2**64), st.integers(0, 9), st.data())
def test_places_of_samples_are_where_they_stand(size, seed, epoch, data):
    places = numpy.array(
        data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=numpy.int64
    )
    assert (places_of(samples_at(places, size, seed, epoch), size, seed, epoch) == places).all()


@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 2**64),
    st.integers(0, 9),
)
def test_blocks_come_in_windows_and_every_sample_once(size, block, window, seed, epoch):
    order = Order(size, block, window)
    samples = order.at(numpy.arange(size), seed, epoch)
    assert sorted(samples.tolist()) == list(range(size))
    if order.blocks <= window:
        assert (samples == samples_at(numpy.arange(size), size, seed, epoch)).all()
        return
    seen = {}
    for place, number in enumerate(samples // block):
        seen.setdefault(int(number), []).append(place)
    assert all(places[-1] - places[0] < window * block for places in seen.values())


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9), st.data())
def test_any_places_can_be_asked_for(size, block, window, data):
    places = numpy.array(
        data.draw(st.lists(st.integers(0, size - 1), max_size=30)), dtype=numpy.int64
    )
    order = Order(size, block, window)
    assert (order.at(places, 3, 1) == order.at(numpy.arange(size), 3, 1)[places]).all()


def test_windows_epochs_and_seeds_differ():
    order = Order(4000, 100, 4)
    first, again, other = (order.at(numpy.arange(4000), *key) for key in ((1, 0), (1, 1), (2, 0)))
    assert (first != again).mean() > 0.9
    assert (first != other).mean() > 0.9
    for rows in (again % 100, other % 100):  # of the blocks, so inside the windows, too
        assert (first % 100 != rows).mean() > 0.9
    mixed = [numpy.argsort(first[begin : begin + 400]).tolist() for begin in range(0, 4000, 400)]
    assert len({tuple(one) for one in mixed}) == 10
