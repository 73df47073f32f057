"""Streams, one per lane: the same samples in every world, and from any step on."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.stream import Stream
from paceline.errors import ConfigError
from paceline.world.world import World
from support.datasets import check_worlds, lanes_of, lanes_together

CONFIG = RunConfig(batch=BatchConfig(global_size=9, lanes=4), steps=6, seed=5)


def noisy(shard, shards):
    """Return samples of varying length, which draw from the generators as they come."""
    length = 4 + 3 * shard
    first = random.randrange(1000)  # drawn once per pass
    for number in range(length):
        yield torch.tensor([shard, number, first, random.randrange(1000)]), torch.rand(1)


def pad(samples):
    return [torch.stack([rows for rows, _ in samples]), torch.rand(len(samples))]


def shuffled(shard, shards):
    return [(torch.tensor([shard, place]), torch.zeros(1)) for place in torch.randperm(20).tolist()]


@pytest.mark.parametrize(("factory", "collate"), [(noisy, None), (noisy, pad), (shuffled, None)])
def test_a_stream_gives_the_same_lanes_in_every_world_from_any_step(factory, collate):
    lanes = check_worlds(lambda: Stream(factory), CONFIG, collate=collate)
    assert [len(lanes[0, lane][1]) for lane in range(4)] == [3, 2, 2, 2]
    assert len({str(lanes[0, lane][0][0]) for lane in range(4)}) > 1


def test_workers_do_not_change_a_stream():
    with_workers = replace(CONFIG, read=ReadConfig(workers=2))
    assert lanes_of(Stream(noisy), with_workers) == lanes_of(Stream(noisy), CONFIG)


def test_a_lane_takes_the_next_samples_of_its_shard():
    lanes = lanes_of(Stream(noisy), CONFIG)
    for lane, size in enumerate([3, 2, 2, 2]):
        taken = [row for step in range(6) for row in lanes[step, lane][0]]
        length = 4 + 3 * lane
        assert [row[0] for row in taken] == [lane] * 6 * size
        assert [row[1] for row in taken] == [number % length for number in range(6 * size)]


def test_a_shard_that_ends_starts_again_as_a_new_pass():
    lanes = lanes_of(Stream(noisy), CONFIG)
    firsts = [row[2] for step in range(6) for row in lanes[step, 0][0]]
    assert len(set(firsts[:4])) == len(set(firsts[4:8])) == 1
    assert firsts[0] != firsts[4]


class Counting(IterableDataset):
    """An iterable that can save where it is, and counts what it reads."""

    read = 0

    def __init__(self, shard, length=6):
        self.shard, self.length, self.epoch = shard, length, None
        self.state = {"at": 0}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.state["at"] < self.length:
            self.state["at"] += 1
            Counting.read += 1
            yield torch.tensor([self.shard, self.epoch, self.state["at"]]), torch.rand(1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def counting(shard, shards):
    return Counting(shard)


def saved_after(steps, size):
    """Return the states of all lanes after some steps, gathered from all ranks."""
    states = {}
    for rank in range(size):
        stream = Stream(counting)
        batches = Batches(stream, CONFIG, World(rank=rank, size=size)).steps()
        for _ in range(steps):
            next(batches)
        states |= stream.state()
        batches.close()
    return states


@pytest.mark.parametrize(("steps", "before", "after"), [(1, 1, 3), (5, 1, 1), (2, 3, 2)])
def test_a_stream_continues_from_its_state_without_reading_again(steps, before, after):
    wanted = {
        key: lane for key, lane in lanes_of(Stream(counting), CONFIG).items() if key[0] >= steps
    }
    states = saved_after(steps, before)
    Counting.read = 0

    def resumed():
        stream = Stream(counting)
        stream.restore(states)
        return stream

    assert lanes_together(resumed, CONFIG, after, steps) == wanted
    assert Counting.read == 9 * (6 - steps)


def test_a_state_that_is_older_or_newer_than_the_step_is_no_harm():
    everything = lanes_of(Stream(counting), CONFIG)
    for saved, start in [(2, 4), (4, 2)]:
        stream = Stream(counting)
        stream.restore(saved_after(saved, 1))
        wanted = {key: lane for key, lane in everything.items() if key[0] >= start}
        assert lanes_of(stream, CONFIG, start=start) == wanted


def test_a_state_does_not_change_when_the_stream_is_read_on():
    stream = Stream(counting)
    steps = Batches(stream, CONFIG, World()).steps()
    next(steps)
    state = stream.state()
    next(steps)
    assert [state[str(lane)]["inner"]["at"] for lane in range(4)] == [3, 2, 2, 2]
    assert [state[str(lane)]["taken"] for lane in range(4)] == [3, 2, 2, 2]


def test_iterables_are_told_their_pass():
    lanes = lanes_of(Stream(counting), CONFIG)
    taken = [row for step in range(6) for row in lanes[step, 0][0]]
    assert [row[1] for row in taken] == [number // 6 for number in range(18)]


def mask(samples):
    return torch.stack([rows for rows, _ in samples]), torch.rand(len(samples), 4)


class Opening(Counting):
    """An iterable that draws a random number with its first sample only."""

    def __iter__(self):
        torch.rand(1)
        for rows, _ in super().__iter__():
            yield rows, torch.zeros(1)


def test_what_collate_draws_does_not_depend_on_when_a_stream_was_opened():
    config = replace(CONFIG, batch=BatchConfig(global_size=4, lanes=4), steps=5)
    stream, again = Stream(lambda shard, _: Opening(shard)), Stream(lambda shard, _: Opening(shard))
    steps = Batches(stream, config, World()).steps()
    next(steps), next(steps)
    again.restore(stream.state())
    wanted = lanes_of(Stream(lambda shard, _: Opening(shard)), config, collate=mask)
    wanted = {key: lane for key, lane in wanted.items() if key[0] >= 2}
    assert lanes_of(again, config, start=2, collate=mask) == wanted


def test_a_known_length_makes_epochs_of_whole_steps():
    config = RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=3)
    batches = Batches(Stream(noisy, samples=20), config, World())
    assert (batches.total_steps, batches.total_samples) == (9, 72)
    ends = [step.plan.ends_epoch for step in batches.steps()]
    assert ends == [False, False, True] * 3
    assert batches.description == "Stream: one shard per lane, 24 samples per epoch"


def test_generators_are_closed_with_the_steps():
    opened = []

    def factory(shard, shards):
        opened.append(noisy(shard, shards))
        return opened[-1]

    steps = Batches(Stream(factory), CONFIG, World()).steps()
    next(steps)
    assert all(generator.gi_frame is not None for generator in opened)
    steps.close()
    assert [generator.gi_frame for generator in opened] == [None] * 4


def restored_from_two_lanes():
    stream = Stream(counting)
    stream.restore({"0": {"taken": 3, "pass": 0, "shards": 2, "inner": {"at": 3}}})
    return stream


@pytest.mark.parametrize(
    ("make", "config", "problem", "fix"),
    [
        (lambda: Stream(noisy), RunConfig(), "no length, and steps=0", "set steps="),
        (lambda: Stream(noisy, samples=0), CONFIG, "must be >= 1, got 0", "samples= out"),
        (
            lambda: Stream(lambda shard, shards: [(1, 2)] * (shard != 2)),
            CONFIG,
            "shard 2 of 4 of the stream has no samples",
            "every shard",
        ),
        (
            lambda: Stream(lambda shard, shards: [torch.ones(shard + n) for n in range(9)]),
            CONFIG,
            r"Tensor\[0\] and Tensor\[1\]",
            "pass collate=",
        ),
        (restored_from_two_lanes, CONFIG, "saved with 2 lanes", "batch.lanes=2"),
    ],
)
def test_streams_that_cannot_be_read_are_refused(make, config, problem, fix):
    with pytest.raises(ConfigError, match=problem) as caught:
        lanes_of(make(), config)
    assert fix in caught.value.fix
