"""Help and refusals come at once: whatever runs outside the ranks does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.program import Done, paceline

TORCH_IMPORT = re.compile(r"^import time:.*\|\s+torch\b", re.MULTILINE)
ANY_IMPORT = re.compile(r"^import time:.*\n", re.MULTILINE)
CODES = "exit codes: 0 yes or fine; 1 the answer is no"


def without_torch(*words: str, folder: Path) -> Done:
    """Run a command, see that it imports no torch, and return it without the list of imports."""
    done = paceline(*words, folder=folder, options=("-X", "importtime"))
    assert ANY_IMPORT.search(done.err)
    assert not TORCH_IMPORT.search(done.err)
    return Done(done.code, " ".join(done.out.split()), ANY_IMPORT.sub("", done.err))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], ["train", "run", "verify", CODES]),
        (["-h"], ["verbs:", CODES]),
        (["--version"], ["paceline 0."]),
        (["run", "--help"], ["-n RANKS", "script", CODES]),
        (["verify", "--help"], ["--worlds", "--steps", "--json", CODES]),
        (
            ["ckpt", "--help"],
            [
                "list|check|export",
                "RUN",
                "OUT.safetensors",
                "--as",
                "gpt2",
                "--step",
                "--json",
                "--force",
                CODES,
            ],
        ),
        (["report", "--help"], ["RUN", "--to", "--runs", "--json", CODES]),
        (
            ["sample", "--help"],
            [
                "RUN",
                "--prompt",
                "--length",
                "--count",
                "--temperature",
                "--top-k",
                "--seed",
                "--step",
                "--json",
                CODES,
            ],
        ),
        (
            ["doctor", "--help"],
            ["JOB.sh", "--nodes", "--quick", "--startup", "--pack", "--json", CODES],
        ),
        (["train", "--help"], ["toy:", "mnist:", "-n RANKS", CODES]),
    ],
)
def test_help_is_given_with_exit_code_0(tmp_path: Path, words: list[str], said: list[str]) -> None:
    done = without_torch(*words, folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert [word for word in said if word not in done.out] == []


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["trian", "toy"], "there is no verb 'trian'", "fix: did you mean train?"),
        (["qqq"], "there is no verb 'qqq'", "fix: use one of: "),
        (["--hepl"], "there is no option '--hepl'", "fix: did you mean --help?"),
        (["run"], "the following arguments are required: script", "usage: paceline run"),
        (["run", "there.py", "-n", "two"], "-n 'two' is not a number of ranks", "fix: give one, as in -n 4"),
        (["run", "there.py", "-n", "0"], "the number of ranks must be at least 1, got 0", "fix: set -n 1 or more"),
        (["run", "theer.py"], "script theer.py does not exist", "fix: did you mean there.py?"),
        (["run", "nowhere/there.py"], "script nowhere/there.py does not exist", "fix: check the path"),
        (["train"], "which recipe?", "fix: use one of: "),
        (["train", "mnits"], "there is no recipe 'mnits'", "fix: did you mean mnist?"),
        (["ckpt", "lsit", "there.py"], "ckpt cannot 'lsit'", "fix: did you mean list?"),
        (["ckpt", "list"], "RUN is missing", "fix: paceline ckpt list RUN"),
        (["ckpt", "list", "nowhere"], "there is no run nowhere", "fix: check the path, or give an address"),
        (["sample"], "which run?", "fix: name its folder"),
        (["sample", "runs/gpt"], "what does the text begin with?", "fix: say it: --prompt"),
        (["verify", "theer.py"], "script theer.py does not exist", "fix: did you mean there.py?"),
        (["verify", "there.py", "--worlds", "1"], "--worlds '1' is not a list of world sizes", "fix: give at least two, such as --worlds 1,2,4"),
        (["verify", "there.py", "--worlds", "0,2"], "--worlds '0,2' is not a list of world sizes", "fix: give at least two"),
        (["verify", "there.py", "--worlds", "1;2"], "--worlds '1;2' is not a list of world sizes", "fix: give at least two"),
        (["bench", "--ops", "all-recude"], "--ops: unknown operation 'all-recude'", "fix: did you mean all-reduce?"),
        (["bench", "--sizes", "1KiB:3x"], "--sizes: '3x' is not a size", "fix: give sizes such as 4kB, 1MiB"),
        (["bench", "--sizes", "1MiB:1KiB"], "--sizes 1MiB:1KiB: the first size is larger than the last", "fix: swap them"),
        (["bench", "-n", "0"], "0 ranks cannot train", "fix: start at least one: -n 1"),
        (["scale", "theer.py"], "there is no script theer.py", "fix: did you mean there.py?"),
        (["scale", "there.py", "--worlds", "0,2"], "--worlds '0,2' is not a list of world sizes", "fix: give at least two"),
        (["scale", "there.py", "--rounds", "0"], "--rounds 0 is too small", "fix: give --rounds 1 or more"),
        (["verify", "there.py", "--steps", "few"], "invalid int value: 'few'", "usage: paceline verify"),
    ],
)  # fmt: skip
def test_bad_usage_is_refused_with_its_fix_and_exit_code_2(
    tmp_path: Path, words: list[str], problem: str, fix: str
) -> None:
    (tmp_path / "there.py").write_text("print('started')\n")
    done = without_torch(*words, folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert fix in done.err
    assert "Traceback" not in done.err


def test_no_words_at_all_show_the_help_and_count_as_bad_usage(tmp_path: Path) -> None:
    done = without_torch(folder=tmp_path)
    assert done.code == 2
    assert "verbs:" in done.out


def test_a_launch_needs_no_torch_where_the_script_needs_none(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert without_torch("run", "plain.py", folder=tmp_path) == Done(0, "False", "")


def test_the_help_of_a_recipe_lists_its_settings_with_their_own_words(tmp_path: Path) -> None:
    done = paceline("train", "mnist", "--help", folder=tmp_path)
    assert done.out.startswith("usage: paceline train mnist ")
    text = re.sub(r"[^\w.,:=+-]+", " ", done.out)
    assert (done.code, done.err) == (0, "")
    assert "--batch.lanes" in text
    assert "The one seed of the run." in text
    assert "BatchNorm after each convolution, or none." in text
