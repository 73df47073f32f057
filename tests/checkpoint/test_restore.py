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
from paceline.checkpoint.manifest import FileFacts, Manifest, NewerFormat
from paceline.checkpoint.save import Saver
from paceline.errors import ConfigError
from paceline.events import surviving
from paceline.train.saving.state import load_state, named_state, python_numbers
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
from support.program import paceline as program


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    """The digest of a run that nothing happened to."""
    return train(settings(tmp_path_factory.mktemp("straight")))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_interrupted_and_resumed_has_the_bits_of_a_straight_run(optimizer, tmp_path) -> None:
    config = settings(tmp_path / "cut", "steps=10")
    cut(config, 7, optimizer=optimizer)
    resumed = train(config, optimizer=optimizer)
    assert resumed == train(settings(tmp_path / "straight", "steps=10"), optimizer=optimizer)
    assert [event["from_step"] for event in events_of(tmp_path / "cut", "RunStarted")] == [0, 5]


def test_python_numbers_in_the_optimizers_state_come_back_as_they_were() -> None:
    before, after = Net(), Net()
    first, second = Numbered(before.parameters(), 0.1), Numbered(after.parameters(), 0.1)
    first.state[before.last.bias].update(count=3, large=2**53 + 1, odd=True)
    assert (
        load_state(after, second, named_state(before, first), python_numbers(first, before)) == []
    )
    found = second.state[after.last.bias]
    assert found == {"count": 3, "large": 2**53 + 1, "odd": True}
    assert {name: type(value) for name, value in found.items()} == {
        "count": int,
        "large": int,
        "odd": bool,
    }


@pytest.mark.parametrize("number", [-0.0, 0.5, math.inf, 0.1, 1 / 3, 1e300, 5e-324])
def test_a_python_float_comes_back_with_all_its_bits(number) -> None:
    before, after = Net(), Net()
    first, second = Numbered(before.parameters(), 0.1), Numbered(after.parameters(), 0.1)
    first.state[before.last.bias]["rate"] = number
    load_state(after, second, named_state(before, first), python_numbers(first, before))
    assert second.state[after.last.bias]["rate"].hex() == number.hex()


def test_a_run_whose_optimizer_keeps_python_numbers_goes_on_with_the_same_bits(tmp_path) -> None:
    config = settings(tmp_path / "cut")
    cut(config, 7, optimizer=Numbered)
    assert train(config, optimizer=Numbered) == train(
        settings(tmp_path / "straight"), optimizer=Numbered
    )


def test_a_run_that_is_cut_again_and_again_ends_with_the_same_bits(tmp_path, straight) -> None:
    config = settings(tmp_path, "checkpoint.every=2steps")
    for steps in (3, 1, 4, 5):
        cut(config, steps)
    assert train(config) == straight
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 2, 2, 6, 10]


def train_there(world, runs: str, cut_after: int = 0) -> str:
    commit._GRACE_S = (
        60  # in this process of its own: a slow disk may take long for the others' files
    )
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
    assert [event["from_step"] for event in events_of(tmp_path / "cut", "RunStarted")] == [
        0,
        5,
        5,
        5,
    ]


DAMAGE = {
    "a flipped bit in the tensors": lambda part: flip(part, -9, 3),
    "a flipped bit in the header": lambda part: flip(part, 20, 1),
    "a flipped bit in the manifest": lambda part: flip(part.with_name("manifest.json"), 300, 0),
    "a torn file": lambda part: part.write_bytes(part.read_bytes()[:1000]),
    "a torn manifest": lambda part: part.with_name("manifest.json").write_bytes(b'{\n "format": 1'),
    "a missing file": lambda part: part.unlink(),
    "an empty manifest": lambda part: part.with_name("manifest.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_is_passed_over_and_kept(damage, tmp_path, straight) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    assert kept(tmp_path) == ["step-000000005", "step-000000010"]
    damage(part_of(tmp_path / "run" / "checkpoints", 10))
    assert train(config) == straight
    (event,) = events_of(tmp_path, "CheckpointBad")
    assert event["step"] == 10
    assert "step-000000010 is damaged: " in event["reason"]
    assert "it is kept as" in event["reason"]
    assert "aside-step-000000010" in event["reason"]
    assert kept(tmp_path) == [
        "aside-step-000000010",
        "step-000000010",
        "step-000000015",
        "step-000000016",
    ]
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 5]


def test_a_newest_without_a_manifest_is_told_of_too(tmp_path, straight) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    (tmp_path / "run" / "checkpoints" / "step-000000010" / "manifest.json").unlink()
    assert train(config) == straight
    assert [event["step"] for event in events_of(tmp_path, "CheckpointBad")] == [10]
    saved = [event["step"] for event in events_of(tmp_path, "CheckpointSaved")]
    assert saved[-3:] == [10, 15, 16], (
        "before, the end may come sooner than word of a save under way"
    )


def test_damage_is_shown_to_the_person_who_looks_on(tmp_path, capsys) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    flip(part_of(tmp_path / "run" / "checkpoints", 10))
    capsys.readouterr()
    train(config)
    assert "step-000000010 is damaged" in capsys.readouterr().out


def test_a_run_without_a_good_checkpoint_starts_over(tmp_path, straight) -> None:
    config = settings(tmp_path)
    cut(config, 12)
    for step in (5, 10):
        flip(part_of(tmp_path / "run" / "checkpoints", step))
    assert train(config) == straight
    assert [event["step"] for event in events_of(tmp_path, "CheckpointBad")] == [10, 5]


MODELS = {
    "a wider layer": (lambda: Net(width=9), ["first.weight was float32[8, 4], is float32[9, 4]"]),
    "an extra layer": (
        lambda: Net(extra=True),
        ["extra.weight float32[1, 1] was not saved", "extra.bias"],
    ),
    "another type": (
        lambda: Net(dtype=torch.float64),
        ["first.weight was float32[8, 4], is float64[8, 4]"],
    ),
    "no norm": (
        lambda: without_norm(),  # noqa: PLW0108
        ["norm.running_mean float32[8] is not in this model", "norm.weight"],
    ),
}


def without_norm() -> nn.Module:
    net = Net()
    net.norm = nn.Identity()
    return net


@pytest.mark.parametrize(("net", "told"), MODELS.values(), ids=MODELS)
def test_another_model_is_refused_with_the_tensors_that_differ(net, told, tmp_path) -> None:
    train(settings(tmp_path, "steps=2"))
    before = files_of(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError) as caught:
        train(settings(tmp_path, "resume=changed"), net=net)  # one has data of another type, too
    assert "step-000000002 does not fit this model" in caught.value.problem
    for words in told:
        assert words in caught.value.problem
    assert "another name=" in caught.value.fix
    assert files_of(tmp_path / "run" / "checkpoints") == before


def test_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    train(settings(tmp_path))
    with pytest.raises(ConfigError, match="optimizer AdamW -> SGD"):
        train(settings(tmp_path), optimizer=OPTIMIZERS["SGD momentum"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SGD", "SGD momentum"),
        ("SGD momentum", "SGD"),
        ("AdamW", "AdamW amsgrad"),
        ("AdamW amsgrad", "AdamW"),
    ],
)
def test_an_optimizer_that_remembers_other_things_is_refused(before, after, tmp_path) -> None:
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


def test_the_command_ends_with_code_3_on_a_newer_format(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "runs" / "toy" / "checkpoints" / "step-000000004"
    folder.mkdir(parents=True)
    files = {"model.safetensors": FileFacts(0, "0" * 16)}
    (folder / "manifest.json").write_bytes(Manifest(4, 128, files).to_json())
    as_newer_format(folder / "manifest.json", monkeypatch)
    done = program("train", "toy", "steps=8", folder=tmp_path)
    assert done.code == 3
    assert "fix: update paceline" in done.err


CHANGED = {
    "seed=1": "seed 0 -> 1",
    "lr.base=0.02": "lr.base 0.01 -> 0.02",
    "batch.global_size=20": "batch.global_size 16 -> 20",
    "batch.lanes=4": "batch.lanes 2 -> 4",
    "clip_norm=1": "clip_norm 0.0 -> 1.0",
    "exact=false": "exact True -> False",
}


@pytest.mark.parametrize(("word", "told"), CHANGED.items(), ids=CHANGED)
def test_changed_settings_are_refused_unless_they_are_meant(word, told, tmp_path) -> None:
    cut(settings(tmp_path), 7)
    before = files_of(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="resume=changed") as caught:
        train(settings(tmp_path, word))
    assert f"is a run with other settings: {told} (in " in caught.value.problem
    assert caught.value.problem.endswith("step-000000005)")
    assert files_of(tmp_path / "run" / "checkpoints") == before
    assert len(train(settings(tmp_path, word, "resume=changed", "steps=7"))) == 64
    assert events_of(tmp_path, "RunStarted")[-1]["from_step"] == 5


@pytest.mark.parametrize(
    "word",
    [
        "log.every_steps=1",
        "checkpoint.every=3steps",
        "checkpoint.keep=9",
        "timeout.step_s=9",
        "device=cpu",
    ],
)
def test_settings_that_do_not_touch_the_bits_may_change(word, tmp_path, straight) -> None:
    cut(settings(tmp_path), 7)
    assert train(settings(tmp_path, word)) == straight


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


def test_a_save_that_fails_ends_the_run_with_a_word(tmp_path, monkeypatch) -> None:
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(paceline.PacelineError, match="No space left on device"):
        train(settings(tmp_path))
    (event,) = events_of(tmp_path, "CheckpointFailed")
    assert "No space left on device" in event["reason"]
    assert event["step"] == 5


def test_the_word_of_a_failed_save_names_the_step_that_was_not_saved(tmp_path, monkeypatch) -> None:
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
    with pytest.raises(paceline.PacelineError, match="cannot save step 5"):
        train(settings(tmp_path))
    assert [event["step"] for event in events_of(tmp_path, "CheckpointFailed")] == [5]


def test_the_best_and_the_newest_are_kept(tmp_path) -> None:
    train(
        settings(
            tmp_path,
            "checkpoint.every=1epoch",
            "checkpoint.keep=1",
            "checkpoint.best=max:eval_loss",
        )
    )
    losses = {
        event["step"]: event["metrics"]["eval_loss"] for event in events_of(tmp_path, "EpochDone")
    }
    worst = max(losses, key=losses.__getitem__)
    assert kept(tmp_path) == sorted({f"step-{worst:09d}", "step-000000016"})
