"""A run that goes on from a checkpoint ends with the bits of a run that was never interrupted, or says why it cannot."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import commit
from paceline.checkpoint import manifest as manifest_module
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.manifest import Manifest, NewerFormat
from paceline.checkpoint.save import Saver
from paceline.errors import ConfigError
from paceline.events import surviving
from paceline.exact.state import load_state, named_state, python_numbers
from support.checkpoint_contents import files_of, flip, part_of
from support.checkpoint_trainings import (
    OPTIMIZERS,
    Cut,
    Net,
    Numbered,
    cut,
    events_of,
    kept,
    settings,
    train,
)
from support.processes import run_on_processes


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    """The digest of a run that nothing happened to."""
    return train(settings(tmp_path_factory.mktemp("straight")))


HARD = ["AdamW amsgrad", "Adafactor", "Python numbers"]


@pytest.mark.parametrize(
    "kind",
    [*HARD, *(pytest.param(n, marks=pytest.mark.heavy) for n in OPTIMIZERS if n not in HARD)],
)
def test_interrupted_and_resumed_has_the_bits_of_a_straight_run(kind, tmp_path) -> None:
    config, optimizer = settings(tmp_path / "cut", "steps=10"), OPTIMIZERS[kind]
    cut(config, 7, optimizer=optimizer)
    resumed = train(config, optimizer=optimizer)
    assert resumed == train(settings(tmp_path / "straight", "steps=10"), optimizer=optimizer)
    assert [event["from_step"] for event in events_of(tmp_path / "cut", "RunStarted")] == [0, 5]


@pytest.mark.parametrize("rate", [-0.0, math.inf, 1 / 3, 1e300, 5e-324])
def test_python_numbers_in_the_optimizers_state_come_back_as_they_were(rate) -> None:
    before, after = Net(), Net()
    first, second = Numbered(before.parameters(), 0.1), Numbered(after.parameters(), 0.1)
    numbers = {"count": 3, "large": 2**53 + 1, "rate": rate, "odd": True}
    first.state[before.last.bias].update(numbers)
    saved = named_state(before, first), python_numbers(first, before)
    assert load_state(after, second, *saved) == []
    found = second.state[after.last.bias]
    assert {name: repr(value) for name, value in found.items()} == {
        name: repr(value) for name, value in numbers.items()
    }


def test_a_run_that_is_cut_again_and_again_ends_with_the_same_bits(tmp_path, straight) -> None:
    config = settings(tmp_path, "checkpoint.every=2steps")
    for steps in (3, 1, 4, 5):
        cut(config, steps)
    assert train(config) == straight
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 2, 2, 6, 10]


def train_there(world, runs: str, cut_after: int = 0) -> str:
    # In this process of its own: a slow disk may take long for the others' files.
    commit._GRACE_S = 60
    try:
        return train(settings(Path(runs), "batch.lanes=4"), world=world, cut_after=cut_after)
    except Cut:
        return "cut"


def test_it_goes_on_at_another_world_size_with_the_same_bits(tmp_path) -> None:
    runs = {"runs": str(tmp_path / "cut")}
    for world, steps in ((4, 7), (1, 6), (2, 0)):  # from step 0, 5 and 10
        ended = run_on_processes(train_there, world, tmp_path, {}, runs | {"cut_after": steps})
    straight = run_on_processes(train_there, 1, tmp_path, {}, {"runs": str(tmp_path / "straight")})
    assert ended == [*straight, ""]
    assert [event["from_step"] for event in events_of(tmp_path / "cut", "RunStarted")] == [0, 5, 10]


def test_the_losses_that_are_shown_do_not_tell_that_it_was_interrupted(tmp_path) -> None:
    train(settings(tmp_path / "straight"))
    config = settings(tmp_path / "cut")
    for steps in (8, 3, 4):
        cut(config, steps)
    train(config)

    def told(runs: Path) -> list[tuple[Any, ...]]:
        events = surviving(runs / "run" / "events.jsonl")
        shown = [event for event in events if event["event"] in {"StepDone", "EpochDone"}]
        return [
            (event["event"], event["step"], event["epoch"], event["loss"], event.get("metrics"))
            for event in shown
        ]

    assert told(tmp_path / "cut") == told(tmp_path / "straight")
    starts = [event["from_step"] for event in events_of(tmp_path / "cut", "RunStarted")]
    assert starts == [0, 5, 5, 5]


DAMAGE = {
    "a flipped bit": lambda part: flip(part, -9, 3),
    "a torn manifest": lambda part: part.with_name("manifest.json").write_bytes(b'{"format": 1'),
    "no manifest": lambda part: part.with_name("manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_is_passed_over_and_kept(damage, tmp_path, straight, capsys) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    assert kept(tmp_path) == ["step-000000005", "step-000000010"]
    damage(part_of(tmp_path / "run" / "checkpoints", 10))
    assert train(config) == straight
    (event,) = events_of(tmp_path, "CheckpointBad")
    assert event["step"] == 10
    assert "step-000000010" in event["reason"]
    assert "step-000000010" in capsys.readouterr().out
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 5]
    steps = [f"step-{step:09d}" for step in (10, 15, 16)]
    if damage is not DAMAGE["no manifest"]:  # without one, there was no checkpoint
        steps = ["aside-step-000000010", *steps]
        assert "aside-step-000000010" in event["reason"]
    assert [name for name in kept(tmp_path) if name in steps] == steps


def test_a_run_without_a_good_checkpoint_starts_over(tmp_path, straight) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    for step in (5, 10):
        flip(part_of(tmp_path / "run" / "checkpoints", step))
    assert train(config) == straight
    assert [event["step"] for event in events_of(tmp_path, "CheckpointBad")] == [10, 5]


def without_norm() -> nn.Module:
    net = Net()
    net.norm = nn.Identity()
    return net


MODELS = {
    "a wider layer": (lambda: Net(width=9), "first.weight was float32[8, 4], is float32[9, 4]"),
    "an extra layer": (lambda: Net(extra=True), "extra.weight float32[1, 1]"),
    "another type": (lambda: Net(dtype=torch.float64), "float32[8, 4], is float64[8, 4]"),
    "no norm": (without_norm, "norm.running_mean float32[8]"),
}


@pytest.mark.parametrize(("net", "told"), MODELS.values(), ids=MODELS)
def test_another_model_is_refused_with_the_tensors_that_differ(net, told, tmp_path) -> None:
    train(settings(tmp_path, "steps=2"))
    before = files_of(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError) as caught:
        train(settings(tmp_path, "resume=changed"), net=net)  # one has data of another type, too
    assert "step-000000002" in caught.value.problem
    assert told in caught.value.problem
    assert "another name=" in caught.value.fix
    assert files_of(tmp_path / "run" / "checkpoints") == before


@pytest.mark.parametrize(
    ("before", "after"),
    [("AdamW", "SGD momentum"), ("SGD", "SGD momentum"), ("AdamW amsgrad", "AdamW")],
)
def test_another_optimizer_or_one_that_remembers_other_things_is_refused(before, after, tmp_path):
    train(settings(tmp_path, "steps=2"), optimizer=OPTIMIZERS[before])
    with pytest.raises(ConfigError, match="optimizer"):
        train(settings(tmp_path), optimizer=OPTIMIZERS[after])


def as_newer_format(path: Path, monkeypatch) -> None:
    manifest = Manifest.from_json(path.read_bytes(), "x")
    with monkeypatch.context() as patched:
        patched.setattr(manifest_module, "FORMAT", manifest_module.FORMAT + 1)
        path.write_bytes(manifest.to_json())


def test_a_newer_format_is_refused_and_nothing_is_moved(tmp_path, monkeypatch) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    checkpoints = tmp_path / "run" / "checkpoints"
    as_newer_format(checkpoints / "step-000000010" / "manifest.json", monkeypatch)
    before = files_of(checkpoints)
    with pytest.raises(NewerFormat, match="update paceline") as caught:
        train(config)
    assert caught.value.exit_code == 3
    assert files_of(checkpoints) == before
    assert kept(tmp_path) == ["step-000000005", "step-000000010"]


CHANGED = {
    "seed=1": "seed 0 -> 1",
    "batch.lanes=4": "batch.lanes 2 -> 4",
    "exact=false": "exact True -> False",
}


@pytest.mark.parametrize(("word", "told"), CHANGED.items(), ids=CHANGED)
def test_changed_settings_are_refused_unless_they_are_meant(word, told, tmp_path) -> None:
    cut(settings(tmp_path), 7)
    before = files_of(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="resume=changed") as caught:
        train(settings(tmp_path, word))
    assert told in caught.value.problem
    assert "step-000000005" in caught.value.problem
    assert files_of(tmp_path / "run" / "checkpoints") == before
    assert len(train(settings(tmp_path, word, "resume=changed", "steps=7"))) == 64
    assert events_of(tmp_path, "RunStarted")[-1]["from_step"] == 5


def test_all_settings_that_change_the_bits_are_refused_at_once(tmp_path) -> None:
    cut(settings(tmp_path), 7)
    words = {"lr.base": "0.02", "batch.global_size": "20", "clip_norm": "1.0"}
    with pytest.raises(ConfigError) as caught:
        train(settings(tmp_path, *(f"{name}={value}" for name, value in words.items())))
    for name, value in words.items():
        assert f"{name} " in caught.value.problem
        assert f"-> {value}" in caught.value.problem


def test_settings_that_do_not_touch_the_bits_may_change(tmp_path, straight) -> None:
    cut(settings(tmp_path), 7)
    words = ["log.every_steps=1", "checkpoint.every=3steps", "checkpoint.keep=9"]
    assert train(settings(tmp_path, *words, "timeout.step_s=9", "device=cpu")) == straight


def test_a_dataset_of_another_length_is_refused(tmp_path) -> None:
    cut(settings(tmp_path), 7)
    with pytest.raises(ConfigError, match="dataset_samples 60 -> 61"):
        train(settings(tmp_path), samples=61)


def test_epochs_may_grow(tmp_path) -> None:
    train(settings(tmp_path / "grown", "epochs=2"))
    assert train(settings(tmp_path / "grown", "epochs=5")) == train(
        settings(tmp_path / "straight", "epochs=5")
    )
    assert events_of(tmp_path / "grown", "RunStarted")[-1]["from_step"] == 8


def test_a_run_that_is_done_stays_done(tmp_path, straight) -> None:
    train(settings(tmp_path))
    before = files_of(tmp_path / "run" / "checkpoints")
    assert train(settings(tmp_path)) == straight
    assert files_of(tmp_path / "run" / "checkpoints") == before


def test_resume_never_starts_over_and_keeps_the_old_ones_aside(tmp_path, straight) -> None:
    cut(settings(tmp_path), 12)
    old = {
        step: files_of(tmp_path / "run" / "checkpoints" / f"step-{step:09d}") for step in (5, 10)
    }
    assert train(settings(tmp_path, "resume=never")) == straight
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 0]
    for step, files in old.items():
        assert files_of(tmp_path / "run" / "checkpoints" / f"aside-step-{step:09d}") == files


def test_a_run_that_breaks_off_while_it_saves_completes_the_save(tmp_path) -> None:
    cut(settings(tmp_path), 5)
    assert kept(tmp_path) == ["step-000000005"]


def test_a_save_that_fails_ends_the_run_and_names_the_step_that_was_not_saved(
    tmp_path, monkeypatch
) -> None:
    write, wait, waited = LocalStorage.write, Saver.wait, []
    second = threading.Event()

    def waiting(saver):
        waited.append(saver)
        if len(waited) == 2:  # the next save is due
            second.set()
        wait(saver)

    def full(storage, step, *words):
        if step == 5:
            assert second.wait(30)
            raise OSError(28, "No space left on device")
        return write(storage, step, *words)

    monkeypatch.setattr(Saver, "wait", waiting)
    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(paceline.PacelineError, match="step 5.*No space left on device"):
        train(settings(tmp_path))
    (event,) = events_of(tmp_path, "CheckpointFailed")
    assert event["step"] == 5
    assert "No space left on device" in event["reason"]


def test_the_best_and_the_newest_are_kept(tmp_path) -> None:
    words = ["checkpoint.every=1epoch", "checkpoint.keep=1", "checkpoint.best=max:eval_loss"]
    train(settings(tmp_path, *words))
    losses = {
        event["step"]: event["metrics"]["eval_loss"] for event in events_of(tmp_path, "EpochDone")
    }
    worst = max(losses, key=losses.__getitem__)
    assert kept(tmp_path) == sorted({f"step-{worst:09d}", "step-000000016"})
