"""Help and refusals come at once: whatever runs outside the ranks does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.measure.bench_plan import OPERATIONS
from paceline.recipes import RECIPES
from support.program import Done, paceline
from support.terminal import in_terminal

TORCH_IMPORT = re.compile(r"^import time:.*\|\s+torch\b", re.MULTILINE)
ANY_IMPORT = re.compile(r"^import time:.*\n", re.MULTILINE)
CODES = "Exit codes: 0 ok, 1 failed or check negative"


def without_torch(*words: str, folder: Path) -> Done:
    """Run a command, see that it imports no torch, and return it without the list of imports."""
    done = paceline(*words, folder=folder, options=("-X", "importtime"))
    assert ANY_IMPORT.search(done.err)
    assert not TORCH_IMPORT.search(done.err)
    return Done(done.code, " ".join(done.out.split()), ANY_IMPORT.sub("", done.err))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], ["Train:", "train", "run", "Check:", "verify", CODES, "Examples:"]),
        (["-h"], ["Data and models:", CODES]),
        (["help"], ["Learn:", CODES]),
        (["--version"], ["paceline 0."]),
        (["init", "--help"], ["usage: paceline init [FILE|FOLDER] [options]", "--from LIBRARY", "torchrun, accelerate, lightning, fabric, hf", "--force"]),
        (["run", "--help"], ["usage: paceline run [options] SCRIPT [ARGUMENT ...]", "-n, --ranks N"]),
        (["help", "run"], ["usage: paceline run [options] SCRIPT [ARGUMENT ...]", "restart at most n times"]),
        (["verify", "--help"], ["--worlds", "--steps", "--json"]),
        (["ckpt", "--help"], ["list", "check", "export", "import"]),
        (["ckpt", "list", "--help"], ["usage: paceline ckpt list [RUN] [options]", "--step", "--json"]),
        (["help", "ckpt", "export"], ["[RUN] OUT", "--as safetensors|gpt2", "--step", "--json", "--force"]),
        (["data", "get", "-h"], ["usage: paceline data get NAME", "--to FOLDER"]),
        (["report", "--help"], ["[RUN ...]", "--to", "--runs", "--json", "--open"]),
        (["help", "watch"], ["usage: paceline watch [RUN|JOBID] [options]"]),
        (["help", "rm"], ["usage: paceline rm RUN ... [options]", "--yes"]),
        (["help", "completion"], ["usage: paceline completion SHELL", "source <(paceline completion bash)"]),
        (
            ["sample", "--help"],
            ["RUN --prompt TEXT", "--length", "--count", "--temperature", "--top-k", "--seed", "--step", "--json"],
        ),
        (["doctor", "--help"], ["JOB.sh", "--nodes", "--quick", "--startup", "--pack", "--json"]),
        (["bench", "--help"], [*OPERATIONS, "--sizes"]),
        (["train", "--help"], [*RECIPES, "-n, --ranks N"]),
    ],
)  # fmt: skip
def test_help_is_given_with_exit_code_0(tmp_path: Path, words: list[str], said: list[str]) -> None:
    done = without_torch(*words, folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    text = done.out.lower()
    assert [part for part in said if part.lower() not in text] == []
    assert (CODES in done.out) == (CODES in said)  # exit codes are shown once, by the program


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (["trian", "toy"], "there is no verb 'trian'", "fix: did you mean train?"),
        (["help", "wacth"], "there is no verb 'wacth'", "fix: did you mean watch?"),
        (["help", "ckpt", "exprot"], "paceline ckpt has no action 'exprot'", "fix: did you mean export?"),
        (["qqq"], "there is no verb 'qqq'", "fix: use one of: "),
        (["--hepl"], "there is no option '--hepl'", "fix: did you mean --help?"),
        (["run"], "SCRIPT is missing", "fix: paceline run [options] SCRIPT [ARGUMENT ...]"),
        (["run", "-n", "3:2", "there.py"], "-n 3:2 is no range: it begins with the fewest ranks", "fix: give the fewest ranks first: -n 2:4"),
        (["run", "."], ". is a folder, not a script", "fix: name the script in it: train.py"),
        (["run", "-n", "two", "there.py"], "-n 'two' is not a number of ranks", "fix: give a number (-n 4) or a range (-n 2:4)"),
        (["run", "-n", "0", "there.py"], "the number of ranks must be at least 1, got 0", "fix: set -n 1 or more"),
        (["run", "--rank", "2", "there.py"], "there is no option --rank", "fix: did you mean --ranks?"),
        (["run", "theer.py"], "script theer.py does not exist", "fix: did you mean there.py?"),
        (["run", "nowhere/there.py"], "script nowhere/there.py does not exist", "fix: check the path"),
        (["train"], "RECIPE is missing", "fix: use one of: "),
        (["train", "mnits"], "there is no recipe 'mnits'", "fix: did you mean mnist?"),
        (["ckpt"], "paceline ckpt needs an action: list, check, export, import", "fix: see `paceline ckpt --help`"),
        (["ckpt", "lsit", "there.py"], "paceline ckpt has no action 'lsit'", "fix: did you mean list?"),
        (["ckpt", "list"], "there are no runs in ", "fix: name a run or its folder, start one with"),
        (["ckpt", "list", "nowhere"], "there is no run nowhere", "fix: check the path, or give an address"),
        (["sample"], "RUN is missing", "fix: paceline sample RUN --prompt TEXT [options]"),
        (["sample", "runs/gpt"], "--prompt is missing", "fix: paceline sample RUN --prompt TEXT [options]"),
        (["sample", "runs/gpt", "--prompt", ""], "--prompt is empty", "fix: give the text to continue"),
        (["verify", "theer.py"], "script theer.py does not exist", "fix: did you mean there.py?"),
        (["verify", "--worlds", "1", "there.py"], "--worlds '1' is not a list of different world sizes", "fix: give at least two, such as --worlds 1,2,4"),
        (["verify", "--worlds", "0,2", "there.py"], "--worlds '0,2' is not a list of different world sizes", "fix: give at least two"),
        (["verify", "--worlds", "1;2", "there.py"], "--worlds '1;2' is not a list of different world sizes", "fix: give at least two"),
        (["bench", "--ops", "all-recude"], "--ops: unknown operation 'all-recude'", "fix: did you mean all-reduce?"),
        (["bench", "--sizes", "1KiB:3x"], "--sizes: '3x' is not a size", "fix: give sizes such as 4kB, 1MiB"),
        (["bench", "--sizes", "1MiB:1KiB"], "--sizes 1MiB:1KiB: the first size is larger than the last", "fix: swap them"),
        (["bench", "-n", "0"], "the number of ranks must be at least 1, got 0", "fix: set -n 1 or more"),
        (["scale", "theer.py"], "script theer.py does not exist", "fix: did you mean there.py?"),
        (["scale", "--worlds", "0,2", "there.py"], "--worlds '0,2' is not a list of different world sizes", "fix: give at least two"),
        (["scale", "--rounds", "0", "there.py"], "--rounds must be at least 1, got 0", "fix: give --rounds 1 or more"),
        (["verify", "--steps", "few", "there.py"], "--steps must be a whole number, got 'few'", "fix: for example: --steps 4"),
        (["verify", "--steps"], "--steps needs a value", "fix: see `paceline verify --help`"),
        (["bench", "--device", "gpu"], "--device must be one of auto, cpu, cuda; got 'gpu'", "fix: did you mean cuda?"),
        (["jobs", "--al"], "there is no option --al", "fix: did you mean --all?"),
        (["jobs", "all"], "unexpected argument 'all'", "fix: paceline jobs [options]"),
        (["submit", "--print", "--json", "there.py"], "--print and --json exclude each other", "fix: give one of them"),
        (["lesson", "4", "--show", "--try"], "--show and --try exclude each other", "fix: give one of them"),
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
    assert "Train:" in done.out


def test_a_launch_needs_no_torch_where_the_script_needs_none(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert without_torch("run", "plain.py", folder=tmp_path) == Done(0, "False", "")


def test_the_help_of_a_recipe_lists_its_settings_with_their_own_words(tmp_path: Path) -> None:
    done = paceline("train", "mnist", "--help", folder=tmp_path)
    assert done.out.startswith("usage: paceline train mnist ")
    text = " ".join(done.out.split())
    assert (done.code, done.err) == (0, "")
    assert "--batch.lanes" in text
    assert "Random seed for weights, data order and augmentation." in text
    assert "BatchNorm after each convolution, or none." in text


def test_version_help_and_completion_import_neither_argparse_nor_rich_nor_dataclasses(
    tmp_path: Path,
) -> None:
    """They must answer in under 0.1 s of CPU; imports are what would cost that."""
    for words in (["--version"], ["--help"], ["--complete", "fish", "run", "x.py", "lr."]):
        done = paceline(*words, folder=tmp_path, options=("-X", "importtime"))
        imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
        assert not imported & {"argparse", "rich", "dataclasses", "torch", "numpy", "inspect"}
        assert not {name for name in imported if name.startswith("paceline.config")}


def test_an_error_is_coloured_on_a_terminal_only(tmp_path: Path) -> None:
    with in_terminal("trian", folder=tmp_path) as terminal:
        assert terminal.wait() == 2
    assert "\x1b[1;31merror:\x1b[0m there is no verb 'trian'" in terminal.written
    assert "\x1b[1;36m  fix:\x1b[0m did you mean train?" in terminal.written
    with in_terminal("trian", folder=tmp_path, env={"NO_COLOR": "1"}) as terminal:
        assert terminal.wait() == 2
    assert "31m" not in terminal.written
    done = paceline("trian", folder=tmp_path)
    assert done.err == "error: there is no verb 'trian'\n  fix: did you mean train?\n"
