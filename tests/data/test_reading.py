"""Steps from files: every sample once, the same in every world, from any step on, however they are read."""

import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading import schedule
from paceline.data.reading.batches import Batches
from paceline.data.reading.prefetch import prefetched
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.transform import PerSample, Transformed
from paceline.errors import ConfigError, DataError
from paceline.world.world import World
from support.datasets import make_dataset, open_folder, rows_of

CONFIG = RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5)


def lanes_of(data, config=CONFIG, world=None, start=0):
    """Return {(step, lane): its batch} of the lanes that count."""
    found = {}
    for step in Batches(data, config, world or World()).steps(start):
        for lane in step.lanes:
            if lane.samples:
                found[step.plan.index, lane.number] = tuple(tensor.clone() for tensor in lane.batch)
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert all(
            torch.equal(mine, yours) for mine, yours in zip(one[key], other[key], strict=True)
        ), key


def windowed(window, **settings):
    return replace(CONFIG, read=ReadConfig(window=window, **settings))


def in_memory(samples):
    rows = rows_of(0, samples)
    return torch.from_numpy(rows["image"]), torch.from_numpy(rows["label"])


def test_shards_of_one_window_give_the_bits_of_memory(tmp_path):
    same(lanes_of(open_folder(make_dataset(tmp_path, 37, 5))), lanes_of(in_memory(37)))


@pytest.mark.parametrize("window", [1, 2, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("samples", "per_shard"), [(37, 5), (9, 20), (64, 8)])
def test_every_sample_comes_once_in_every_world(tmp_path, window, size, samples, per_shard):
    folder, config = make_dataset(tmp_path, samples, per_shard), windowed(window)
    alone = lanes_of(open_folder(folder), config)
    together = {}
    for rank in range(size):
        together |= lanes_of(open_folder(folder), config, World(rank=rank, size=size))
    same(together, alone)
    steps = -(-samples // 8)
    for epoch in range(2):
        labels = [
            int(n) for (step, _), batch in alone.items() if step // steps == epoch for n in batch[1]
        ]
        assert Counter(labels) == Counter(range(samples))


@pytest.mark.parametrize("start", [1, 4, 5, 7, 9])
def test_any_step_can_be_the_first(tmp_path, start):
    source, config = open_folder(make_dataset(tmp_path, 37, 5)), windowed(2)
    wanted = {key: batch for key, batch in lanes_of(source, config).items() if key[0] >= start}
    same(lanes_of(source, config, start=start), wanted)


def test_a_late_start_opens_only_the_shards_of_its_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_STEPS", 1)
    source = open_folder(make_dataset(tmp_path, 400, 10))
    steps = Batches(source, windowed(2, prefetch_steps=1), World()).steps(25)
    next(steps)
    steps.close()
    assert 0 < len(source._shards.open) <= 6  # at most 4 steps of 8 samples, from windows of 20


def noisy(batch, draws):
    image, label = batch
    return image.float() + draws.uniform(12).reshape(image.shape), label + draws.integers(0, 1000)[
        :, 0
    ] * 1000


@pytest.mark.parametrize("size", [1, 3])
def test_random_transforms_of_lanes_are_keyed_by_sample(tmp_path, size):
    folder, config = make_dataset(tmp_path, 37, 5), windowed(2)
    together = {}
    for rank in range(size):
        together |= lanes_of(
            Transformed(open_folder(folder), noisy), config, World(rank=rank, size=size)
        )
    same(together, lanes_of(Transformed(open_folder(folder), noisy), config))
    fewer = replace(config, batch=BatchConfig(global_size=5, lanes=1))
    seen, again = (
        {
            int(label) % 1000: int(label)
            for _, (_, labels) in sorted(found.items(), key=lambda item: item[0])
            for label in labels
        }
        for found in (together, lanes_of(Transformed(open_folder(folder), noisy), fewer))
    )
    assert seen == again  # of the second epoch, in other batches


def test_draws_differ_between_samples_epochs_and_calls():
    numbers = numpy.arange(50)
    draws = SampleRng(numbers, (1, 0))
    first, second, later = draws.uniform(4), draws.uniform(4), SampleRng(numbers, (1, 1)).uniform(4)
    assert len(torch.unique(torch.cat([first, second, later]))) == 600
    assert 0.4 < float(first.mean()) < 0.6
    assert set(SampleRng(numbers, (3, 0)).integers(2, 5, 9).flatten().tolist()) == {2, 3, 4}


def jitter(image, label):
    return image.float() + torch.rand(3, 4), label


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_change_no_bit(tmp_path, workers):
    folder = make_dataset(tmp_path, 21, 4)
    alone = lanes_of(PerSample(open_folder(folder), jitter), windowed(2))
    found = {}
    for rank in range(2):
        found |= lanes_of(
            PerSample(open_folder(folder), jitter),
            windowed(2, workers=workers),
            World(rank=rank, size=2),
        )
    same(found, alone)


def test_what_goes_wrong_while_reading_ahead_is_raised(tmp_path):
    source = open_folder(make_dataset(tmp_path, 40, 5))
    (tmp_path / "00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"00003\.safetensors"):
        lanes_of(source)


def test_an_error_of_ours_in_a_worker_stays_what_it_is(tmp_path):
    data = PerSample(open_folder(make_dataset(tmp_path, 21, 4)), jitter)
    (tmp_path / "00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"(?s)00003\.safetensors.*fix: "):
        lanes_of(data, windowed(2, workers=2))


def test_a_script_that_fails_while_samples_are_read_ends_with_its_own_error(tmp_path):
    folder = make_dataset(
        tmp_path,
        64,
        8,
        lambda first, last: {"x": numpy.zeros((last - first, 1 << 20), dtype="uint8")},
    )
    script = f"""
from paceline.config import BatchConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.open_dataset import open_dataset
from paceline.world.world import World
config = RunConfig(batch=BatchConfig(8, lanes=1), epochs=100)
steps = Batches(open_dataset({str(folder)!r}, config), config, World()).steps()
next(steps)
raise ValueError("mine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, "ValueError: mine" in done.stderr) == (1, True)


def fails_at_9(image, label):
    if int(label) == 9:
        raise ValueError("sample 9 is odd")
    return image, label


def test_what_goes_wrong_in_a_worker_is_raised(tmp_path):
    data = PerSample(open_folder(make_dataset(tmp_path, 21, 4)), fails_at_9)
    with pytest.raises(ValueError, match="sample 9 is odd"):
        lanes_of(data, windowed(2, workers=1))


def test_no_thread_is_left_when_steps_are_not_all_taken(tmp_path):
    before = set(threading.enumerate())
    steps = Batches(open_folder(make_dataset(tmp_path, 37, 5)), CONFIG, World()).steps()
    next(steps)
    steps.close()
    assert not set(threading.enumerate()) - before


def test_the_window_reaches_a_file_through_whatever_is_around_it(tmp_path):
    source = open_folder(make_dataset(tmp_path, 21, 4))
    Batches(PerSample(source, jitter), windowed(3), World())
    assert source.window == 3


def test_a_transform_that_returns_a_tensor_is_refused(tmp_path):
    data = Transformed(open_folder(make_dataset(tmp_path, 21, 4)), lambda batch, draws: batch[0])
    with pytest.raises(ConfigError, match="return a tuple"):
        lanes_of(data)


@pytest.mark.parametrize(("low", "high"), [(5, 5), (5, 3), (0, 2**40)])
def test_draws_from_an_impossible_range_are_refused(low, high):
    with pytest.raises(ConfigError, match="range"):
        SampleRng(numpy.arange(3), (0, 0)).integers(low, high)


def test_so_many_pieces_are_read_ahead_and_no_more():
    begun, fourth = [], threading.Event()

    def read(want, place):
        begun.append((want, place))
        if len(begun) == 4:
            fourth.set()
        return want

    pieces = prefetched(iter(range(10)), read, depth=2)
    assert next(pieces) == (0, 0)
    assert fourth.wait(90)  # 0 is ours, 1 and 2 wait, 3 is read
    assert begun == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert next(pieces) == (1, 1)
    pieces.close()
    assert len(begun) <= 5


def test_samples_made_one_by_one_come_in_the_order_of_their_shards(tmp_path):
    folder = make_dataset(tmp_path, 37, 5)
    same(
        lanes_of(PerSample(open_folder(folder), lambda *sample: sample), windowed(2)),
        lanes_of(open_folder(folder), windowed(2)),
    )
