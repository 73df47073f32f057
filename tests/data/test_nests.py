"""Nested batches: whatever collate returns reaches the training with its types, lane by lane."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.nest import describe, is_pinned, leaves_of, map_leaves, to_device
from paceline.data.reading.source import as_source
from paceline.data.reading.transform import Transformed
from paceline.errors import ConfigError
from paceline.world.world import World
from support.datasets import make_dataset, open_folder

CONFIG = RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5)
WITH_WORKERS = RunConfig(
    batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5, read=ReadConfig(workers=2)
)


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    edges: list
    size: int = field(default=0, init=False)


class Encoding(UserDict):
    """A mapping that copies itself, as transformers' BatchEncoding does."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()} | {"moved": 1})


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "nest",
    [
        ONE,
        (ONE, "text"),
        [ONE, 3, None],
        {"a": ONE, "b": {"c": [ONE]}},
        OrderedDict(a=ONE),
        UserDict(a=ONE),
        Point(ONE, "p"),
        Graph(ONE, [(ONE, ONE)]),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_a_nest_keeps_its_types_and_its_other_values(nest):
    copied = to_device(nest, "meta")
    assert type(copied) is type(nest)
    for before, after in zip(leaves_of(nest), leaves_of(copied), strict=True):
        if isinstance(before, torch.Tensor):
            assert after.device.type == "meta"
            assert before.device.type == "cpu"
        else:
            assert after is before
    assert not is_pinned(nest)


def test_objects_that_copy_themselves_are_asked_to():
    assert to_device([Encoding(ids=ONE)], "cpu")[0]["moved"] == 1
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = to_device({"packed": packed}, "meta")["packed"]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_a_nest_without_tensors_needs_no_copy():
    assert is_pinned({"name": "a", "numbers": [1, 2]})
    assert map_leaves(str, {"a": (1, [2])}) == {"a": ("1", ["2"])}


def test_a_sample_is_described_by_types_and_shapes():
    sample = {"ids": torch.zeros(3, 4), "labels": [1, 2], "pair": (1.0, "x"), "none": []}
    assert (
        describe(sample)
        == "{ids: Tensor[3, 4], labels: list of 2 int, pair: (float, str), none: empty list}"
    )


class Sentences(Dataset):
    """Samples of varying length, as mappings."""

    def __len__(self):
        return 37

    def __getitem__(self, sample):
        noise = torch.randint(1000, (1,))
        return {"ids": torch.full((1 + sample % 5,), sample), "noise": noise, "name": f"s{sample}"}


def pad(samples):
    ids = torch.nn.utils.rnn.pad_sequence([one["ids"] for one in samples], batch_first=True)
    mask = torch.rand(ids.shape) < 0.5  # collators that mask draw random numbers
    names = [one["name"] for one in samples]
    noise = torch.cat([one["noise"] for one in samples])
    return {"inputs": Point(ids, "ids"), "mask": mask, "names": names, "noise": noise}


def lanes_of(data, config=CONFIG, world=None, start=0, collate=None):
    """Return {(step, lane): its batch as comparable values}."""
    found = {}
    for step in Batches(data, config, world or World(), collate=collate).steps(start):
        for lane in step.lanes:
            values = map_leaves(
                lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, lane.batch
            )
            found[step.plan.index, lane.number] = values
    return found


@pytest.mark.parametrize("config", [CONFIG, WITH_WORKERS], ids=["inline", "workers"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_lane_is_padded_alike_in_every_world(size, config):
    alone = lanes_of(Sentences(), collate=pad)
    together = {}
    for rank in range(size):
        together |= lanes_of(Sentences(), config, World(rank=rank, size=size), collate=pad)
    assert together == alone
    assert len({len(batch["inputs"].x[0]) for batch in alone.values()}) > 1
    assert len({str(batch["mask"]) for batch in alone.values()}) > len(alone) // 2


def test_a_collated_run_can_be_entered_at_any_step():
    wanted = {key: batch for key, batch in lanes_of(Sentences(), collate=pad).items() if key[0] > 6}
    assert lanes_of(Sentences(), start=7, collate=pad) == wanted


class Cached(Sentences):
    """A dataset that draws a random number only when it makes a sample for the first time."""

    def __init__(self):
        self.made = {}

    def __getitem__(self, sample):
        if sample not in self.made:
            self.made[sample] = super().__getitem__(sample)
        return self.made[sample] | {"noise": torch.zeros(1)}


def test_what_collate_draws_does_not_depend_on_what_was_read_before():
    second_epoch = {key: one for key, one in lanes_of(Cached(), collate=pad).items() if key[0] > 4}
    assert lanes_of(Cached(), start=5, collate=pad) == second_epoch


def test_mappings_are_stacked_by_default():
    data = [{"image": torch.full((2,), float(number)), "label": number} for number in range(8)]
    lane = next(Batches(data, CONFIG, World()).steps()).lanes[0]
    assert lane.batch["image"].shape == (2, 2)
    assert lane.batch["image"][:, 0].tolist() == lane.batch["label"].tolist()


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, sample):
        return torch.full((3,), float(sample))


def test_samples_that_are_tensors_become_a_tensor():
    lane = next(Batches(Rows(), CONFIG, World()).steps()).lanes[0]
    assert lane.batch.shape == (2, 3)


@pytest.mark.parametrize("kind", ["tensors", "TensorDataset", "shards"])
def test_collate_makes_batches_of_tensors_and_shards_too(kind, tmp_path):
    shards = open_folder(make_dataset(tmp_path, 37, 5))
    columns = shards.gather(torch.arange(37).numpy(), (0, 0))
    columns = tuple(column.clone() for column in columns)
    data = {"tensors": columns, "TensorDataset": TensorDataset(*columns), "shards": shards}[kind]
    collated = lanes_of(data, collate=lambda samples: {"label": [int(s[1]) for s in samples]})
    plain = lanes_of(columns)
    assert {key: batch["label"] for key, batch in collated.items()} == {
        key: batch[1] for key, batch in plain.items()
    }


def fails(samples):
    raise ValueError("no such column")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "problem", "fix"),
    [
        (None, r"default_collate .*\{ids: Tensor\[\d\].* and \{ids: Tensor\[\d\]", "pass collate="),
        (fails, r"fails cannot make .*no such column \(test_nests.py, line", "correct fails"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(collate, problem, fix, workers):
    config = RunConfig(
        batch=BatchConfig(global_size=8, lanes=2), read=ReadConfig(workers=workers), epochs=1
    )
    with pytest.raises(ConfigError, match=problem) as caught:
        lanes_of(Sentences(), config, collate=collate)
    assert fix in caught.value.fix


def test_collate_is_refused_where_there_are_no_single_samples(tmp_path):
    shards = open_folder(make_dataset(tmp_path, 9, 5))
    data = Transformed(shards, lambda batch, rng: batch)
    with pytest.raises(ConfigError, match="leave collate= out"):
        Batches(data, CONFIG, World(), collate=list)


def test_a_transform_may_work_on_a_nest():
    def shift(batch, rng):
        return {"image": batch["image"] + rng.uniform(2), "label": batch["label"]}

    data = [{"image": torch.full((2,), float(number)), "label": number} for number in range(20)]
    alone = lanes_of(Transformed(as_source(data), shift))
    together = {}
    for rank in range(3):
        world = World(rank=rank, size=3)
        together |= lanes_of(Transformed(as_source(data), shift), world=world)
    assert together == alone


class Reshuffled(Dataset):
    """A dataset that changes from epoch to epoch."""

    epoch = None

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, sample):
        return torch.tensor(sample), torch.tensor(self.epoch)


@pytest.mark.parametrize("config", [CONFIG, WITH_WORKERS], ids=["inline", "workers"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_dataset_is_told_the_epoch_of_its_samples(config, wrapped):
    data = torch.utils.data.Subset(Reshuffled(), range(12)) if wrapped else Reshuffled()
    for step in Batches(data, config, World()).steps():
        for lane in step.lanes:
            assert set(lane.batch[1].tolist()) == {step.plan.epoch}


def test_a_tensor_is_a_dataset_of_its_rows() -> None:
    lane = next(Batches(torch.arange(12.0).view(6, 2), CONFIG, World()).steps()).lanes[0]
    assert lane.batch.shape[1:] == (2,)


def test_a_dict_of_datasets_gives_dicts_of_their_samples() -> None:
    data = {"x": torch.arange(12.0).view(6, 2), "y": [{"label": number} for number in range(6)]}
    lane = next(Batches(data, CONFIG, World()).steps()).lanes[0]
    assert lane.batch["x"][:, 0].tolist() == [2.0 * n for n in lane.batch["y"]["label"].tolist()]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"x": torch.ones(3), "y": torch.ones(4)}, r"different lengths: \{'x': 3, 'y': 4\}"),
        ({"x": torch.ones(3), "y": 5}, "'y' of this dict is int"),
    ],
)
def test_a_dict_that_is_no_dataset_is_refused(data, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Batches(data, CONFIG, World())


def test_a_transform_of_whole_batches_is_the_same_in_every_world() -> None:
    def noisy(batch: dict, rng) -> dict:
        return batch | {"x": batch["x"] + rng.uniform(2)}

    found = {}
    for size in (1, 2):
        lanes = {}
        for rank in range(size):
            data = paceline.transformed({"x": torch.zeros(6, 2)}, noisy)
            for step in Batches(data, CONFIG, World(rank=rank, size=size)).steps():
                for lane in step.lanes:
                    lanes[step.plan.index, lane.number] = lane.batch["x"].tolist()
        found[size] = lanes
    assert found[1] == found[2]
    assert len({str(rows) for rows in found[1].values()}) > 2
