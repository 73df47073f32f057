"""The verb `data`: what a person sees of packing, checking and showing a set."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest

from paceline.cli.main import run_verb
from support.program import Done, started
from support.terminal import in_terminal

IMAGES = (numpy.indices((12, 8, 8)).sum(axis=0) * 10).astype("uint8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an input, as the current one."""
    numpy.savez(tmp_path / "x.npz", image=IMAGES, label=numpy.arange(12) % 3)
    (tmp_path / "x.txt").write_text("To be,\nor not \x1b[31mto be.\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the verb in this process, which is fast."""

    def run(*words: object) -> Done:
        code = run_verb(["data", *map(str, words)])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def packed(data: Callable[..., Done]) -> Callable[..., Done]:
    """The same, where a set of three shards is there."""
    assert data("pack", "x.npz", "--to", "out", "--shard", "288B", "--workers", "1").code == 0
    return data


def test_a_pack_ends_with_a_sentence_and_says_the_same_as_json(data: Callable[..., Done]) -> None:
    pack = ("pack", "x.npz", "--workers", 1, "--to")
    done = data(*pack, "out", "--shard", "0.288kB")
    assert (done.code, done.err) == (0, "")
    said = r"out: 12 samples of image, label in 3 shards, [\d.]+ kB, in \d+\.\d s\n"
    assert re.fullmatch(said, done.out)
    told = json.loads(data(*pack, "one", "--columns", "label,image", "--json").out)
    assert (told["where"], told["samples"], told["shards"]) == ("one", 12, 1)
    assert [column["name"] for column in told["columns"]] == ["label", "image"]


def test_every_option_reaches_the_packer(data: Callable[..., Done], folder: Path) -> None:
    from PIL import Image

    (folder / "in" / "cats").mkdir(parents=True)
    Image.fromarray(IMAGES[0]).save(folder / "in" / "cats" / "0.png")
    told = json.loads(data("pack", "in", "--to", "a", "--size", "5x4", "--grey", "--json").out)
    image = {"name": "image", "type": "uint8", "shape": [5, 4], "varying": False}
    assert told["columns"][0] == image
    letters = ("--as", "characters", "--length", "3", "--json")
    told = json.loads(data("pack", "x.txt", "--to", "b", *letters).out)
    assert (told["columns"][0]["shape"], told["about"]["text"]) == ([4], "characters")
    told = json.loads(data("pack", "x.txt", "--to", "c", "--train-tokenizer", "260", "--json").out)
    assert told["about"]["text"] == "tokens"
    again = ["pack", "x.txt", "--to", "d", "--tokenizer", "c/tokenizer.json", "--json"]
    assert json.loads(data(*again).out)["about"] == told["about"]
    assert data("pack", "x.txt", "--to", "d").code == 2
    assert data("pack", "x.txt", "--to", "d", "--force").code == 0


def test_a_whole_set_is_ok(packed: Callable[..., Done]) -> None:
    done = packed("check", "out")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("out: ok: 12 samples of image, label in 3 shards")
    assert json.loads(packed("check", "out", "--json").out) == {
        "where": "out", "ok": True, "problems": [], "strays": [],
    }  # fmt: skip


def test_damage_is_told_with_its_file_and_the_answer_is_no(
    packed: Callable[..., Done], folder: Path
) -> None:
    os.truncate(folder / "out" / "00001.safetensors", 100)
    (folder / "out" / "00002.safetensors").unlink()
    (folder / "out" / "notes").write_text("mine")
    done = packed("check", "out")
    assert done.code == 1
    lines = done.out.splitlines()
    assert re.fullmatch(r"out/00001.safetensors: 100 bytes instead of [\d,]+", lines[0])
    assert lines[1:] == [
        "out/00002.safetensors: is missing", "out/notes does not belong to the dataset", "out: not ok: 2 problems",
    ]  # fmt: skip
    told = json.loads(packed("check", "out", "--json").out)
    assert (told["ok"], [problem["file"] for problem in told["problems"]]) == (
        False, ["00001.safetensors", "00002.safetensors"],
    )  # fmt: skip
    assert packed("check", "nowhere").code == 1


def test_show_says_what_is_inside_with_samples(packed: Callable[..., Done]) -> None:
    done = packed("show", "out", "--sample", "0,11")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("out: 12 samples of image, label in 3 shards")
    assert lines[1:4] == ["  image  uint8 [8, 8]", "  label  int64", '  from: ["x.npz"]']
    assert [line for line in lines if line.startswith(("sample", "  label:"))] == [
        "sample 0", "  label: 0", "sample 11", "  label: 2",
    ]  # fmt: skip
    assert lines[lines.index("sample 11") + 2] == "    ==++***#"
    told = json.loads(packed("show", "out", "--sample", "5", "--json").out)
    assert (told["shown"]["5"]["label"], told["samples_per_shard"]) == ("2", 4)


def test_show_says_how_an_hdf5_file_is_laid_out_and_what_it_costs(
    data: Callable[..., Done], folder: Path
) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("image", (640, 64, 64), "uint8", chunks=(64, 8, 8))
    told = data("show", "x.h5").out
    for part in ("640 samples", "chunks (64, 8, 8)", "`paceline data pack x.h5 --to FOLDER`"):
        assert part in told
    (dataset,) = json.loads(data("show", "x.h5", "--json").out)["datasets"]
    found = dataset["rows"], dataset["chunk"], dataset["problems"][0]["here"]
    assert found == (640, [64, 8, 8], True)


def test_a_text_that_is_shown_orders_the_terminal_nothing(data: Callable[..., Done]) -> None:
    data("pack", "x.txt", "--to", "out", "--workers", 1)
    assert "  tokens: To be, or not to be. \n" in data("show", "out").out


def test_bad_usage_that_its_files_show_is_refused_with_its_fix(data: Callable[..., Done]) -> None:
    done = data("pack", "x.npz", "--to", "out", "--size", "28x28")
    assert (done.code, done.out) == (2, "")
    assert "--size" in done.err and "\n  fix: remove it" in done.err
    done = data("show", "out", "--sample", "first")
    assert done.code == 2
    assert "--sample 'first'" in done.err and "--sample 0,5" in done.err


def test_packing_checking_and_showing_need_no_torch_and_other_verbs_no_numpy(folder: Path) -> None:
    script = """
import sys
from paceline.cli.main import run_verb
assert run_verb(["--help"]) == run_verb(["run", "--help"]) == run_verb(["data", "pack", "--help"]) == 0
assert "numpy" not in sys.modules
assert run_verb("data pack x.npz --to out --workers 1".split()) == 0
assert run_verb("data check out".split()) == run_verb("data show out".split()) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupted_pack_says_how_to_go_on_and_leaves_no_worker(folder: Path) -> None:
    numpy.save(folder / "y.npy", numpy.zeros((2_000, 50)))
    words = ("data", "pack", "y.npy", "--to", "out", "--shard", "400", "--workers", "2")
    with started(*words, folder=folder, cold=True) as running:
        while not (folder / "out" / "00003.safetensors").exists():
            assert running.process.poll() is None
            time.sleep(0.01)
        os.kill(running.process.pid, signal.SIGINT)
        done = running.wait()
        assert running.left_over() == []
    assert (done.code, done.err) == (130, "interrupted; run the same command to resume in out\n")
    assert not (folder / "out" / "index.json").exists()


def test_on_a_terminal_there_is_a_bar_and_pictures_have_colours(folder: Path) -> None:
    words = ("data", "pack", "x.npz", "--to", "out", "--shard", "288", "--workers", "1")
    with in_terminal(*words, folder=folder) as screen:
        assert screen.wait() == 0
        assert "packing shards 1/3" in screen.written
        assert "\rout: 12 samples" in screen.written.replace("\n", "\r")
    for env, mark in (
        ({"COLORTERM": "truecolor"}, "\x1b[38;2;0;0;0;48;2;10;10;10m▀"),
        ({"COLORTERM": ""}, "\x1b[38;5;232;48;5;232m▀"),
        ({"COLORTERM": "", "NO_COLOR": "1"}, "       ..:::"),
    ):
        with in_terminal("data", "show", "out", folder=folder, env=env) as screen:
            assert screen.wait() == 0
            assert mark in screen.written
