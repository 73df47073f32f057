"""Bad input is answered once, with the problem, its fix and the right exit code; nothing is left running."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from support.program import Done, around, paceline

SETTINGS = "import paceline\nprint('settings read', paceline.config_from_argv().seed)\n"


def refused(done: Done, code: int, problem: str, fix: str) -> None:
    """See that an error is said once, on stderr, whole."""
    assert done.code == code, done
    assert problem in done.err
    assert f"\n  fix: {fix}" in done.err
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["seed=x"], "seed must be a whole number, got 'x'", "for example: seed=4"),
        (["seed=1.5"], "seed must be a whole number, got '1.5'", "for example: seed=4"),
        (["exact=maybe"], "exact must be true or false, got 'maybe'", "for example: exact=true"),
        (["lr.base=fast"], "lr.base must be a number, got 'fast'", "for example: lr.base=0.5"),
        (["lr.base=nan"], "lr.base must be a number >= 0, got nan", "for example: lr.base=0.001"),
        (["parallel=dpd"], "parallel must be one of none, ddp, fsdp; got 'dpd'", "did you mean ddp?"),
        (["epoch=3"], "there is no setting 'epoch'", "did you mean epochs?"),
        (["batch.lane=3"], "there is no setting 'batch.lane'", "did you mean batch.lanes?"),
        (["--epoch", "3"], "there is no flag --epoch", "did you mean --epochs?"),
        (["--batch.lane=3"], "there is no flag --batch.lane", "did you mean --batch.lanes?"),
        (["--epochs", "three"], "epochs must be a whole number, got 'three'", "for example: epochs=4"),
        (["seven"], "unexpected argument 'seven'", "give settings as key=value"),
        (["batch.global_size=3", "batch.lanes=4"], "batch.global_size=3 is smaller than batch.lanes=4", "set batch.lanes=3 or less"),
        (["epochs=0"], "epochs must be at least 1, got 0", "set epochs=1 or more"),
        (["compression=fp16"], "compression=fp16 rounds gradients", "add exact=false"),
        (["name=a/b"], "name='a/b' is not a folder name", "set name= to a name without slashes"),
        (["--config", "nowhere.toml"], "cannot read config file nowhere.toml", "check the path given with --config"),
        (["--config", "kind.toml"], "batch.lanes must be a whole number, got 'four'", "for example: batch.lanes=4"),
        (["--config", "number.toml"], "name must be a text, got 5", 'for example: name="name"'),
        (["--config", "key.toml"], "there is no setting 'batch.lane'", "did you mean batch.lanes?"),
        (["--config", "broken.toml"], "broken.toml is not TOML", "correct that line"),
        (["--config", "bytes.toml"], "bytes.toml is not TOML", "correct that line"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_refused_once_for_all_ranks(
    tmp_path: Path, words: list[str], problem: str, fix: str
) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "kind.toml").write_text('[batch]\nlanes = "four"\n')
    (tmp_path / "number.toml").write_text("name = 5\n")
    (tmp_path / "key.toml").write_text("[batch]\nlane = 4\n")
    (tmp_path / "broken.toml").write_text("seed = = 3\n")
    (tmp_path / "bytes.toml").write_bytes(b'name = "\xff"\n')
    done = paceline("run", "-n", "2", "settings.py", *words, folder=tmp_path)
    refused(done, 2, problem, fix)
    assert done.out == ""


def test_the_launchers_settings_win_over_a_bad_guess_but_must_be_json(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    good = paceline(
        "run", "settings.py", "seed=3", folder=tmp_path, env={"PACELINE_SET": '{"seed": 9}'}
    )
    assert good == Done(0, "settings read 9\n", "")
    bad = paceline("run", "settings.py", folder=tmp_path, env={"PACELINE_SET": "{"})
    refused(bad, 2, "PACELINE_SET is not JSON", "unset PACELINE_SET")


def test_a_recipe_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    done = paceline("train", "mnist", "norms=batch", folder=tmp_path)
    refused(done, 2, "there is no setting 'norms'", "did you mean norm?")


TRAIN = """
import os
import numpy, torch
from torch.nn.functional import mse_loss
import paceline
from paceline.data.order import samples_at

def main(config):
    with paceline.Run(config) as run:
        inputs, targets = torch.ones(int(os.environ.get("SAMPLES", 32)), 2), torch.ones(int(os.environ.get("SAMPLES", 32)), 1)
        if "POISON" in os.environ:
            inputs[samples_at(numpy.array([int(os.environ["POISON"])]), 32, config.seed, 0)] = float("nan")
        model = run.model(torch.nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        updates = open(f"updates-{run.world.rank}", "a")
        optimizer.register_step_post_hook(lambda *_: print("update", file=updates, flush=True))
        paceline.Trainer(run, model, optimizer, (inputs, targets), mse_loss).fit()

main(paceline.config_from_argv())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script that trains, and with a file where a folder could be wanted."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "occupied").write_text("a file, not a folder\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "samples", "code", "problem", "fix"),
    [
        (["-n", "2", "batch.lanes=1"], "32", 2, "2 ranks cannot share 1 lanes", "set batch.lanes=2, or start at most 1 ranks"),
        ([], "0", 2, "the dataset has 0 samples", "check the path or the filter that made it"),
        (["-n", "2", "runs=occupied"], "32", 3, "cannot write occupied/train: ", "free disk space, allow writing there"),
        (["device=cuda"], "32", 3, "device=cuda, but this rank sees no GPU", "ask the scheduler for GPUs, or set device=cpu"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_before_the_first_update(
    folder: Path, words: list[str], samples: str, code: int, problem: str, fix: str
) -> None:
    done = paceline(
        "run",
        *around("train.py", words),
        folder=folder,
        env={"SAMPLES": samples, "CUDA_VISIBLE_DEVICES": ""},
    )
    refused(done, code, problem, fix)
    assert [file.read_text() for file in folder.glob("updates-*")] in ([], [""], ["", ""])


def test_a_loss_that_is_not_a_number_stops_every_rank_and_names_step_and_lane(folder: Path) -> None:
    poison = {"POISON": str(2 * 8 + 7)}  # the last sample of the third step: lane 3, rank 1 of 2
    done = paceline(
        "run", "-n", "2", "train.py", "batch.global_size=8", "epochs=5", folder=folder, env=poison
    )
    refused(done, 1, "the loss is nan at step 3, lane 3 (rank 1)", "try lr.base 10 x lower")
    assert [(folder / f"updates-{rank}").read_text().count("update") for rank in range(2)] == [2, 2]
    last = json.loads((folder / "runs/train/events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("RunFailed", 2)


def idx(*shape: int, held: int) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(held)


@pytest.mark.parametrize(
    ("files", "problem", "fix"),
    [
        (None, "data=mnist needs the folder of the MNIST IDX files", "run `paceline data get mnist`, set data_folder= to their folder"),
        ({}, "data has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz", "put the file into data"),
        ({"train-images-idx3-ubyte": idx(10, 28, 28, held=7000)}, "must have 7,840 bytes of data (10, 28, 28), got 7,000", "download the file again"),
        ({"train-images-idx3-ubyte": b"<html>not found</html>"}, "is not an IDX file of bytes (it starts with 3c68746d)", "download the file again"),
        ({"train-images-idx3-ubyte": idx(1, 28, 28, held=784)}, "its checksum is not that of train-images-idx3-ubyte", "download the file again"),
    ],
    ids=["no folder", "missing", "truncated", "not IDX", "checksum"],
)  # fmt: skip
def test_data_that_is_not_what_it_claims_to_be_is_named(
    tmp_path: Path, files: dict[str, bytes] | None, problem: str, fix: str
) -> None:
    words = [] if files is None else ["data_folder=data"]
    (tmp_path / "data").mkdir()
    for name, content in (files or {}).items():
        (tmp_path / "data" / name).write_bytes(content)
    done = paceline("train", "mnist", "data=mnist", *words, folder=tmp_path)
    refused(done, 3, problem, fix)
    assert not (tmp_path / "runs").exists()
