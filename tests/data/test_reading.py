"""Steps: every sample once, the same in every world, from any step on, however they are read, from whatever the user has."""

import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading import schedule
from paceline.data.reading.batches import Batches
from paceline.data.reading.prefetch import prefetched
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.source import as_source
from paceline.data.reading.transform import PerSample, Transformed
from paceline.errors import ConfigError, DataError
from paceline.world.world import World
from support.datasets import check_worlds, lanes_of, lanes_together, make_dataset, open_folder

CONFIG = RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5)
NUMBERS = torch.arange(37.0).unsqueeze(1)


def windowed(window, **settings):
    return replace(CONFIG, read=ReadConfig(window=window, **settings))


@pytest.mark.parametrize(
    ("window", "samples", "per_shard"), [(1, 37, 5), (2, 37, 5), (3, 64, 8), (16, 9, 20)]
)
def test_every_sample_comes_once_in_every_world(tmp_path, window, samples, per_shard):
    folder = make_dataset(tmp_path, samples, per_shard)
    lanes = check_worlds(lambda: open_folder(folder), windowed(window), sizes=(2, 3, 4))
    for epoch in range(2):
        steps = range(epoch * -(-samples // 8), (epoch + 1) * -(-samples // 8))
        labels = [
            label for (step, _), batch in lanes.items() if step in steps for label in batch[1]
        ]
        assert Counter(labels) == Counter(range(samples))


def test_shards_of_one_window_give_the_bits_of_memory(tmp_path):
    shards = open_folder(make_dataset(tmp_path, 37, 5))
    columns = tuple(column.clone() for column in shards.gather(numpy.arange(37), (0, 0)))
    assert lanes_of(shards, CONFIG) == check_worlds(lambda: columns, CONFIG)


def test_tensors_come_in_several_dresses():
    pair = [NUMBERS, NUMBERS]
    first, *others = (
        [list(lane) for lane in lanes_of(data, CONFIG).values()]
        for data in (tuple(pair), pair, TensorDataset(*pair))
    )
    assert others == [first, first]


class Noisy(Dataset):
    """A dataset whose samples are augmented at random."""

    def __len__(self):
        return 10

    def __getitem__(self, sample):
        return torch.tensor([float(sample)]) + torch.rand(1), torch.tensor(sample)


def jitter(image, label):
    return image.float() + torch.rand(3, 4), label


def noisy(batch, draws):
    image, label = batch
    more = draws.integers(0, 1000)[:, 0] * 1000
    return image.float() + draws.uniform(12).reshape(image.shape), label + more


def test_random_transforms_are_keyed_by_the_sample(tmp_path):
    check_worlds(Noisy, replace(CONFIG, batch=BatchConfig(4, lanes=3)))
    folder, config = make_dataset(tmp_path, 37, 5), windowed(2)
    lanes = check_worlds(lambda: Transformed(open_folder(folder), noisy), config)
    fewer = replace(config, batch=BatchConfig(global_size=5, lanes=1))
    seen, again = (
        {label % 1000: label for _, (_, labels) in sorted(found.items()) for label in labels}
        for found in (lanes, lanes_of(Transformed(open_folder(folder), noisy), fewer))
    )
    assert seen == again  # of the second epoch, in other batches


def test_workers_change_no_bit(tmp_path):
    folder = make_dataset(tmp_path, 21, 4)

    def make():
        return PerSample(open_folder(folder), jitter)

    together = lanes_together(make, windowed(2, workers=2), 2)
    assert together == lanes_of(make(), windowed(2))


def test_samples_made_one_by_one_come_in_the_order_of_their_shards(tmp_path):
    folder = make_dataset(tmp_path, 37, 5)
    made = PerSample(open_folder(folder), lambda *sample: sample)
    assert lanes_of(made, windowed(2)) == lanes_of(open_folder(folder), windowed(2))


def test_a_late_start_opens_only_the_shards_of_its_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_STEPS", 1)
    source = open_folder(make_dataset(tmp_path, 400, 10))
    steps = Batches(source, windowed(2, prefetch_steps=1), World()).steps(25)
    next(steps)
    steps.close()
    assert 0 < len(source._shards.open) <= 6  # at most 4 steps of 8 samples, from windows of 20


def test_draws_differ_between_samples_epochs_and_calls():
    numbers = numpy.arange(50)
    draws = SampleRng(numbers, (1, 0))
    first, second, later = draws.uniform(4), draws.uniform(4), SampleRng(numbers, (1, 1)).uniform(4)
    assert len(torch.unique(torch.cat([first, second, later]))) == 600
    assert 0.4 < float(first.mean()) < 0.6
    assert set(SampleRng(numbers, (3, 0)).integers(2, 5, 9).flatten().tolist()) == {2, 3, 4}
    for low, high in ((5, 5), (5, 3), (0, 2**40)):
        with pytest.raises(ConfigError, match="range"):
            SampleRng(numbers, (0, 0)).integers(low, high)


def fails_at_9(image, label):
    if int(label) == 9:
        raise ValueError("sample 9 is odd")
    return image, label


@pytest.mark.parametrize("workers", [0, 1])
def test_what_goes_wrong_while_reading_ahead_is_raised(tmp_path, workers):
    source = open_folder(make_dataset(tmp_path, 21, 4))
    with pytest.raises(ValueError, match="sample 9 is odd"):
        lanes_of(PerSample(source, fails_at_9), windowed(2, workers=workers))
    (tmp_path / "00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"(?s)00003\.safetensors.*fix: "):
        lanes_of(PerSample(open_folder(tmp_path), jitter), windowed(2, workers=workers))


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
        ({"image": NUMBERS, "label": 5}, "label"),
        ([{"image": 1}, {"label": 2}] * 8, "pass collate="),
        (
            Transformed(as_source((NUMBERS, NUMBERS)), lambda batch, draws: batch[0]),
            "return a tuple",
        ),
    ],
)
def test_what_cannot_be_a_training_set_is_refused(data, fix):
    with pytest.raises(ConfigError, match=fix):
        next(Batches(data, CONFIG, World()).steps())


def test_steps_instead_of_epochs():
    batches = Batches((NUMBERS, NUMBERS), replace(CONFIG, steps=7), World())
    assert (batches.total_steps, batches.total_samples) == (7, 37 + 16)
    sizes = [8, 8, 8, 8, 5, 8, 8]
    assert [step.plan.samples for step in batches.steps()] == sizes
