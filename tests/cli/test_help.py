"""Help and refusals come at once: whatever runs outside the ranks does not import torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.commands import COMMANDS
from paceline.cli.main import run_verb
from paceline.config import RunConfig
from paceline.config.help import settings_help
from support.program import Done, paceline
from support.terminal import in_terminal

STORED = dict(
    re.findall(
        r"^\$ ([^\n]+)\n(.*?)(?=^\$ |\Z)",
        Path(__file__).with_name("help.txt").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
)
"""The help texts by command line, as `make reference` writes them."""
TYPE_ALL = """
import contextlib, io, json, shlex, sys
from paceline.cli.main import run_verb
found = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_verb(shlex.split(line))
    found.append([code, out.getvalue(), err.getvalue()])
    assert "torch" not in sys.modules, line
print(json.dumps(found))
"""


def typed_without_torch(lines: list[str], folder: Path) -> list[Done]:
    """Type command lines in one new process, and see that none of them imports torch."""
    command = [sys.executable, "-c", TYPE_ALL, json.dumps(lines)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return [Done(*each) for each in json.loads(done.stdout)]


def test_every_help_is_the_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    names = [*COMMANDS, *(f"{verb} {action}" for verb in COMMANDS for action in COMMANDS[verb].actions)]  # fmt: skip
    lines = ["--help", *(f"{name} --help" for name in names)]
    assert {*STORED} == {f"paceline {line}" for line in lines} | {"python train.py --help"}
    for done, line in zip(typed_without_torch(lines, tmp_path), lines, strict=True):
        assert done == Done(0, STORED[f"paceline {line}"].rstrip("\n") + "\n", ""), line
    stored = STORED["python train.py --help"].rstrip("\n")
    assert settings_help(RunConfig, "train.py") == stored
    for same in (["-h"], ["help"], []):
        assert run_verb(same) == (0 if same else 2)  # no words at all are bad usage
        assert capsys.readouterr().out.rstrip("\n") == STORED["paceline --help"].rstrip("\n")
    assert run_verb(["help", "ckpt", "list"]) == 0
    assert capsys.readouterr().out.startswith("usage: paceline ckpt list [RUN]")


MISTAKES = {
    # what is typed: what the refusal names, and its fix
    "trian toy": ["'trian'", "train?"],
    "help wacth": ["'wacth'", "watch?"],
    "help ckpt exprot": ["'exprot'", "export?"],
    "qqq": ["'qqq'", "use one of: "],
    "--hepl": ["'--hepl'", "--help?"],
    "run": ["SCRIPT", "paceline run [options] SCRIPT"],
    "run -n 3:2 there.py": ["-n 3:2", "-n 2:4"],
    "run .": [". is a folder", "train.py"],
    "run -n two there.py": ["'two'", "-n 4"],
    "run -n 0 there.py": ["got 0", "-n 1"],
    "run --rank 2 there.py": ["--rank", "--ranks?"],
    "run theer.py": ["theer.py", "there.py?"],
    "run nowhere/there.py": ["nowhere/there.py", "path"],
    "train": ["RECIPE", "gpt, mnist, toy"],
    "train mnits": ["'mnits'", "mnist?"],
    "ckpt": ["list, check, export, import", "--help"],
    "ckpt lsit there.py": ["'lsit'", "list?"],
    "ckpt list": ["no runs in ", "name a run"],
    "ckpt list nowhere": ["nowhere", "address"],
    "data": ["pack, check, show, get, bench", "--help"],
    "data pack x.npz --to out --shard big": ["--shard 'big'", "--shard 32MB"],
    "data pack x.npz --to out --shard 0": ["--shard '0'", "--shard 32MB"],
    "data pack x.npz --to out --workers -1": ["--workers", "-1", "remove it"],
    "data pack x.npz --to out --size 28": ["--size '28'", "--size 28x28"],
    "data pack x.npz --to out --colums image": ["--colums", "--columns?"],
    "data show out extra": ["'extra'", "paceline data show DATASET [options]"],
    "completion tcsh": ["'tcsh'", "bash, zsh, fish"],
    "sample": ["RUN", "--prompt TEXT"],
    "sample runs/gpt": ["--prompt", "paceline sample RUN"],
    'sample runs/gpt --prompt ""': ["--prompt", "text"],
    "verify theer.py": ["theer.py", "there.py?"],
    "verify --worlds 1 there.py": ["--worlds '1'", "--worlds 1,2,4"],
    "verify --worlds 0,2 there.py": ["--worlds '0,2'", "at least two"],
    "verify --worlds '1;2' there.py": ["--worlds '1;2'", "at least two"],
    "verify --steps few there.py": ["--steps", "'few'", "--steps 4"],
    "verify --steps": ["--steps", "paceline verify --help"],
    "bench --ops all-recude": ["'all-recude'", "all-reduce?"],
    "bench --sizes 1KiB:3x": ["'3x'", "1MiB"],
    "bench --sizes 1MiB:1KiB": ["1MiB:1KiB", "swap"],
    "bench -n 0": ["got 0", "-n 1"],
    "bench --device gpu": ["auto, cpu, cuda", "'gpu'", "cuda?"],
    "scale --worlds 0,2 there.py": ["--worlds '0,2'", "at least two"],
    "scale --rounds 0 there.py": ["--rounds", "got 0", "--rounds 1"],
    "watch": ["no runs in ", "name a run"],
    "watch run more": ["'more'", "[RUN|JOBID]"],
    "watch run --onec": ["--onec", "--once?"],
    "watch run --every 0": ["--every", "got 0", "--every 2"],
    "watch run --every nan": ["--every", "got nan", "--every 2"],
    "report": ["no runs in ", "start one"],
    "report --open --json": ["--open and --json", "one of them"],
    "report run --jsno": ["--jsno", "--json?"],
    "jobs --al": ["--al", "--all?"],
    "jobs all": ["'all'", "paceline jobs [options]"],
    "cancel": ["run", "name a run"],
    "submit --print --json there.py": ["--print and --json", "one of them"],
    "init --from lightnin": ["torchrun, accelerate, lightning, fabric, hf", "'lightnin'", "lightning?"],
    "lesson 4 --show --try": ["--show and --try", "one of them"],
    "lesson 2 --try": ["2", "try one of 0, 1, 4"],
    "lesson 99 --check": ["99", "a number from 0 to "],
    "lesson --try": ["`paceline lesson` lists them"],
    "lesson --show": ["`paceline lesson` lists them"],
    "lesson 4 --json": ["--json", "add --check"],
    "lesson 4 5": ["5", "give one number"],
    "lesson 4 --all --check": ["--all", "without a number"],
    "lesson --grades": ["--grades", "--check --all --json > ada.json"],
    "doctor nowhere.sh": ["nowhere.sh"],
    "doctor there.py": ["--startup there.py"],
    "doctor large.sh": ["larger than 1 MiB"],
    "doctor a.sh b.sh": ["'b.sh'"],
    "doctor --node-list a": ["--node-list", "did you mean"],
    "doctor --startup --pack x": ["exclude each other"],
    "doctor there.py --nodes a,b": ["exclude each other"],
    "doctor --nodes a": ["one host"],
    "doctor --nodes 203.0.113.1,203.0.113.2": ["not one of"],
    "doctor --nodes a,b --node 2": ["not one of"],
    "doctor -n -1": ["-n", "got -1"],
    "doctor --env x": ["--pack FOLDER"],
    "doctor --pack out --env .": ["pyvenv.cfg"],
}  # fmt: skip


def test_bad_usage_is_refused_with_its_fix_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("print('started')\n")
    (tmp_path / "large.sh").write_text("#" * (1 << 20) + "\n")
    for line, done in zip(MISTAKES, typed_without_torch([*MISTAKES], tmp_path), strict=True):
        assert (done.code, done.out) == (2, ""), line
        assert [part for part in MISTAKES[line] if part not in done.err] == [], f"{line}\n{done.err}"  # fmt: skip
        assert done.err.count("error: ") == done.err.count("\n  fix: ") == 1, line
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_is_refused_as_unfit(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    lines = {
        "data pack y.npz --to out": "x.npz?",
        "data show out": "out",
        "doctor --nodes n[1-": "n[1-",
    }
    for done, part in zip(typed_without_torch([*lines], tmp_path), lines.values(), strict=True):
        assert (done.code, done.out) == (3, "")
        assert part in done.err and "\n  fix: " in done.err


def test_a_launch_needs_no_torch_where_the_script_needs_none(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    assert paceline("run", "plain.py", folder=tmp_path, cold=True) == Done(0, "False\n", "")


def test_the_help_of_a_recipe_lists_its_settings_with_their_own_words(tmp_path: Path) -> None:
    done = paceline("train", "mnist", "--help", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("usage: paceline train mnist ")
    assert "--batch.lanes" in done.out and "BatchNorm" in done.out


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
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with in_terminal("trian", folder=tmp_path, env=env) as terminal:
            assert terminal.wait() == 2
        assert ("\x1b[1;31merror:\x1b[0m" in terminal.written) == coloured
        assert ("\x1b[1;36m  fix:\x1b[0m" in terminal.written) == coloured
    (done,) = typed_without_torch(["trian"], tmp_path)
    assert "\x1b" not in done.err
