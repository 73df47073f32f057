"""Is a dataset that changes between epochs read as `set_epoch` makes it, and is one that the loop changes refused?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset

import paceline
from paceline.config.values import with_settings
from paceline.errors import ConfigError
from paceline.exact.state import state_digest
from paceline.world.world import World
from support.loops import RunIn, line
from support.processes import run_on_processes

SETTINGS = {"batch.global_size": 4, "batch.lanes": 2, "epochs": 3, "checkpoint.every": "end"}


class Levels(Dataset):
    """Its samples depend on the epoch; it also counts its reads, keeps the last one and opens a file."""

    level = 0

    def __init__(self) -> None:
        self.order, self.epoch = numpy.arange(8), 0
        self.reads, self.seen, self.file = 0, [], None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.seen.append(index)
        self.file = self.file or Path(__file__)
        return torch.tensor([1000.0 * self.level + 100.0 * self.epoch + index])


class WithEpochs(Levels):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.generator = numpy.random.default_rng(epoch)  # another object in every call
        self.order = torch.randperm(8).numpy()  # from the global generator
        self.level = int(self.order[0])


class Wrapper(Dataset):
    def __init__(self, base: Dataset) -> None:
        self.base, self.strength = base, 0.5

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.base[index]


def stepped(
    folder: Path, data: Any, callbacks: tuple[paceline.Callback, ...] = (), **settings: Any
) -> Iterator[tuple[paceline.Run, paceline.Step]]:
    """Train on a dataset; yield the run and each step after its update."""
    config = with_settings(paceline.RunConfig(), SETTINGS | {"runs": str(folder)} | settings)
    with paceline.Run(config, callbacks=callbacks) as run:
        if hasattr(data, "state_dict"):
            run.track(data=data)
        model, optimizer = line(run, lr=0.0)
        for step in run.steps(data):
            run.update(optimizer, lambda batch: model(batch).mean(), step)
            yield run, step


def rows_of(
    folder: Path,
    data: Any,
    body: Callable[[paceline.Step], None] = lambda step: None,
    **settings: Any,
) -> list[list[float]]:
    """Return the samples of every step."""
    rows = []
    for run, step in stepped(folder, data, **settings):
        rows.append([float(value) for lane in step.lanes for value in lane.flatten()])
        body(step)
        if step.index == 0:
            run.evaluate(data, lambda batch: {"mean": batch.flatten()})
    return rows


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: Subset(each, range(8)), Wrapper])
def test_set_epoch_comes_before_the_first_sample_of_an_epoch_with_and_without_workers(
    tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    inline = rows_of(tmp_path / "0", wrap(WithEpochs()))
    assert [[int(row) % 1000 // 100 for row in rows] for rows in inline] == [
        [epoch] * 4 for epoch in (0, 0, 1, 1, 2, 2)
    ]
    assert rows_of(tmp_path / "2", wrap(WithEpochs()), **{"read.workers": 2}) == inline
    first = [1000 * inner for inner in {int(rows[0]) // 1000 for rows in inline}]
    assert len(first) > 1  # what set_epoch draws differs from epoch to epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_that_calls_set_epoch_as_paceline_does_is_right(tmp_path, workers):
    class Keyed(WithEpochs):
        def set_epoch(self, epoch: int) -> None:
            self.epoch, self.generator = epoch, numpy.random.default_rng(epoch)
            self.order = self.generator.permutation(8)

    data = Keyed()
    expected = rows_of(tmp_path / "plain", Keyed())

    def body(step: paceline.Step) -> None:
        data.set_epoch(step.epoch + step.ends_epoch)
        _ = data[1]  # a person looks at a sample

    assert rows_of(tmp_path / "called", data, body, **{"read.workers": workers}) == expected


def named() -> Wrapper:
    base = Levels()
    base.names = ["one"]
    return Wrapper(base)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (Levels, lambda data, step: vars(data).update(level=step.epoch + 1), "Levels.level"),
        (Levels, lambda data, _: vars(data).update(order=data.order[::-1].copy()), "Levels.order"),
        (named, lambda data, _: data.base.names.append("more"), "Levels.names"),
        (
            lambda: Wrapper(Wrapper(Levels())),
            lambda data, step: vars(data.base).update(strength=0.1 * step.index),
            "Wrapper.strength",
        ),
        (WithEpochs, lambda data, step: data.set_epoch(step.epoch + 1), "WithEpochs."),
        (lambda: torch.arange(8.0).view(8, 1), lambda data, _: data.add_(1.0), "tensor 0"),
    ],
)
def test_what_the_loop_changes_is_refused_by_name(tmp_path, make, change, name, workers):
    data = make()
    with pytest.raises(ConfigError, match=name) as found:
        rows_of(tmp_path, data, lambda step: change(data, step), **{"read.workers": workers})
    assert name == "tensor 0" or "set_epoch" in found.value.fix


def test_a_tracked_dataset_may_change_without_workers(tmp_path: Path) -> None:
    class Tracked(Levels):
        def state_dict(self) -> dict:
            return {"level": self.level}

        def load_state_dict(self, state: dict) -> None:
            self.level = state["level"]

    data, levels = Tracked(), []
    for _, step in stepped(tmp_path, data):
        levels.append(int(step.lanes[0].max()) // 1000)
        data.level = step.index
    assert levels == [0, 0, 1, 2, 3, 4]


def test_an_evaluation_of_the_same_dataset_leaves_the_epoch_of_the_training(tmp_path):
    data, epochs = WithEpochs(), []
    data.set_epoch = lambda epoch: setattr(data, "epoch", epoch)
    for run, step in stepped(tmp_path, Subset(data, range(8))):
        epochs.append(int(step.lanes[0].max()) // 100)
        found = run.evaluate(Subset(data, range(4)), lambda batch: {"mean": batch.flatten()})
        assert found == {"mean": 1.5}  # always that of epoch 0
    assert epochs == [0, 0, 1, 1, 2, 2]


def test_epoch_start_comes_before_the_samples_of_the_epoch_are_read(tmp_path: Path) -> None:
    reads = []

    class Starts(paceline.Callback):
        def epoch_start(self, run: paceline.Run, step: paceline.Step) -> None:
            reads.append((step.epoch, data.reads))
            with pytest.raises(ConfigError, match="epoch_start"):
                _ = step.lanes

    data = Levels()
    assert len(list(stepped(tmp_path, data, (Starts(),)))) == 6
    assert reads == [(0, 0), (1, 8), (2, 16)]


class Jitter:
    """A transform with a generator of its own, as those of albumentations."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, value: float) -> float:
        return value + self.generator.random()


class Augmented(Dataset):
    """Draws from generators of its own, one of which it makes when it first needs it."""

    def __init__(self) -> None:
        self.numpys, self.torchs = numpy.random.default_rng(0), torch.Generator().manual_seed(0)
        self.order_of, self.order, self.late = numpy.random.RandomState(0), [0], None
        self.transforms = [Jitter()]

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        self.order = self.order_of.permutation(24).tolist()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.late is None:
            self.late = numpy.random.default_rng(1)
        drawn = self.numpys.normal() + torch.rand((), generator=self.torchs).item()
        drawn += self.late.random() + self.order[index]
        return torch.tensor([self.transforms[0](index / 24 + drawn)])


class Collate:
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + torch.from_numpy(self.rng.random((len(samples), 1))).float()


def augmented(world: World, config: paceline.RunConfig) -> str:
    with RunIn(world, config) as run:
        torch.manual_seed(0)
        model, optimizer = line(run, lr=0.001)
        for step in run.steps(Subset(Augmented(), range(24)), collate=Collate()):
            run.update(optimizer, lambda batch: model(batch).mean(), step)
    return state_digest(model, optimizer)


def test_generators_of_a_dataset_its_transforms_and_collate_are_seeded_by_sample(tmp_path, capfd):
    found = set()
    settings = SETTINGS | {"runs": str(tmp_path), "steps": 8, "seed": 3}
    for name, ranks, steps in (("one", 1, 8), ("two", 2, 8), ("part", 2, 7), ("part", 1, 8)):
        given = settings | {"name": name, "steps": steps}
        digests = run_on_processes(augmented, ranks, tmp_path, given)
        found |= set(digests) if steps == 8 else set()
    given = settings | {"name": "workers", "read.workers": 2}  # forked ranks cannot have workers
    found.add(augmented(World(), with_settings(paceline.RunConfig(), given)))
    assert len(found) == 1
    assert "change whenever" not in capfd.readouterr().err
