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
    said, _, advice = done.err.partition("\n  fix: ")
    assert problem in said
    assert fix in advice
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.out + done.err


def test_a_bad_setting_is_refused_once_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    done = paceline("run", "-n", "2", "settings.py", "batch.lane=3", folder=tmp_path)
    refused(done, 2, "'batch.lane'", "batch.lanes?")
    assert done.out == ""
    done = paceline("train", "mnist", "norms=batch", folder=tmp_path)
    refused(done, 2, "'norms'", "norm?")


def test_the_launchers_settings_win_over_a_bad_guess_but_must_be_json(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    words = ("run", "settings.py", "seed=3")
    good = paceline(*words, folder=tmp_path, env={"PACELINE_SET": '{"seed": 9}'})
    assert good == Done(0, "settings read 9\n", "")
    bad = paceline(*words, folder=tmp_path, env={"PACELINE_SET": "{"})
    refused(bad, 2, "PACELINE_SET", "unset PACELINE_SET")


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
        (["-n", "2", "batch.lanes=1"], "32", 2, "2 ranks cannot share 1 lanes", "batch.lanes=2"),
        ([], "0", 2, "0 samples", "check the path"),
        (["-n", "2", "runs=occupied"], "32", 3, "occupied/train", "allow writing there"),
        (["device=cuda"], "32", 3, "device=cuda", "device=cpu"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_update(
    folder: Path, words: list[str], samples: str, code: int, problem: str, fix: str
) -> None:
    env = {"SAMPLES": samples, "CUDA_VISIBLE_DEVICES": ""}
    refused(paceline("run", *around("train.py", words), folder=folder, env=env), code, problem, fix)
    assert [file.read_text() for file in folder.glob("updates-*")] in ([], [""], ["", ""])


def test_a_loss_that_is_not_a_number_stops_every_rank_and_names_step_and_lane(folder: Path) -> None:
    poison = {"POISON": str(2 * 8 + 7)}  # the last sample of the third step: lane 3, rank 1 of 2
    done = paceline(
        "run", "-n", "2", "train.py", "batch.global_size=8", "epochs=5", folder=folder, env=poison
    )
    refused(done, 1, "nan at step 3, lane 3 (rank 1)", "lr.base")
    assert [(folder / f"updates-{rank}").read_text().count("update") for rank in range(2)] == [2, 2]
    last = json.loads((folder / "runs/train/events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("RunFailed", 2)


def idx(*shape: int, held: int) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(held)


DATA = {
    "no folder": (None, "data=mnist", "paceline data get mnist"),
    "missing": ({}, "train-images-idx3-ubyte.gz", "into data"),
    "truncated": (idx(10, 28, 28, held=7000), "7,840 bytes of data (10, 28, 28), got 7,000", "again"),
    "not IDX": (b"<html>not found</html>", "3c68746d", "again"),
    "checksum": (idx(1, 28, 28, held=784), "checksum", "again"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "problem", "fix"), DATA.values(), ids=DATA)
def test_data_that_is_not_what_it_claims_to_be_is_named(
    tmp_path: Path, content: bytes | dict[str, bytes] | None, problem: str, fix: str
) -> None:
    (tmp_path / "data").mkdir()
    if isinstance(content, bytes):
        (tmp_path / "data" / "train-images-idx3-ubyte").write_bytes(content)
    words = [] if content is None else ["data_folder=data"]
    refused(paceline("train", "mnist", "data=mnist", *words, folder=tmp_path), 3, problem, fix)
    assert not (tmp_path / "runs").exists()
