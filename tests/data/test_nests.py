"""Nested batches: whatever collate returns reaches the training with its types, lane by lane."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.nest import is_pinned, leaves_of, map_leaves, to_device
from paceline.data.reading.transform import Transformed
from paceline.errors import ConfigError
from paceline.world.world import World
from support.datasets import check_worlds, lanes_of, lanes_together, make_dataset, open_folder

CONFIG = RunConfig(batch=BatchConfig(global_size=8, lanes=4), epochs=2, seed=5)
WITH_WORKERS = replace(CONFIG, read=ReadConfig(workers=2))


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


def test_a_lane_is_padded_alike_in_every_world_and_from_any_step():
    alone = check_worlds(Sentences, CONFIG, start=6, collate=pad)
    assert lanes_together(Sentences, WITH_WORKERS, 2, collate=pad) == alone
    assert len({len(batch["inputs"].x[0]) for batch in alone.values()}) > 1
    assert len({str(batch["mask"]) for batch in alone.values()}) > len(alone) // 2


class Cached(Sentences):
    """A dataset that draws a random number only when it makes a sample for the first time."""

    def __init__(self):
        self.made = {}

    def __getitem__(self, sample):
        if sample not in self.made:
            self.made[sample] = super().__getitem__(sample)
        return self.made[sample] | {"noise": torch.zeros(1)}


def test_what_collate_draws_does_not_depend_on_what_was_read_before():
    check_worlds(Cached, CONFIG, sizes=(), start=5, collate=pad)


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


def test_collate_makes_batches_of_tensors_and_shards_too(tmp_path):
    shards = open_folder(make_dataset(tmp_path, 37, 5))
    columns = shards.gather(torch.arange(37).numpy(), (0, 0))
    columns = tuple(column.clone() for column in columns)
    plain = {key: batch[1] for key, batch in lanes_of(columns, CONFIG).items()}
    for data in (columns, TensorDataset(*columns), shards):
        assert lanes_of(data, CONFIG, collate=lambda samples: [int(s[1]) for s in samples]) == plain


def fails(samples):
    raise ValueError("no such column")


@pytest.mark.parametrize(
    ("collate", "workers", "problem", "fix"),
    [
        (None, 0, r"ids: Tensor\[\d\].*ids: Tensor\[\d\]", "pass collate="),
        (None, 1, r"ids: Tensor\[\d\].*ids: Tensor\[\d\]", "pass collate="),
        (fails, 0, "fails.*no such column.*test_nests.py", "correct fails"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(collate, workers, problem, fix):
    config = replace(CONFIG, read=ReadConfig(workers=workers))
    with pytest.raises(ConfigError, match=problem) as caught:
        lanes_of(Sentences(), config, collate=collate)
    assert fix in caught.value.fix


def test_collate_is_refused_where_there_are_no_single_samples(tmp_path):
    shards = open_folder(make_dataset(tmp_path, 9, 5))
    data = Transformed(shards, lambda batch, rng: batch)
    with pytest.raises(ConfigError, match="leave collate= out"):
        Batches(data, CONFIG, World(), collate=list)


def test_a_transform_of_whole_batches_may_work_on_a_nest():
    def noisy(batch, rng):
        return batch | {"x": batch["x"] + rng.uniform(2)}

    rows = [{"x": torch.full((2,), float(number)), "label": number} for number in range(20)]
    for data in (rows, {"x": torch.zeros(20, 2)}):
        lanes = check_worlds(lambda data=data: paceline.transformed(data, noisy), CONFIG)
        assert len({str(batch["x"]) for batch in lanes.values()}) == len(lanes)


class Reshuffled(Dataset):
    """A dataset that changes from epoch to epoch."""

    epoch = None

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, sample):
        return torch.tensor(sample), torch.tensor(self.epoch)


@pytest.mark.parametrize(
    ("config", "wrapped"), [(CONFIG, False), (CONFIG, True), (WITH_WORKERS, True)]
)
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
