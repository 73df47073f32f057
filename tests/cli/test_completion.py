"""Does the tab key complete verbs, options, settings, recipes, runs and scripts, in the shells themselves?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import complete
from paceline.cli.commands import COMMANDS
from paceline.cli.main import run_verb
from support.terminal import Terminal, program_in_terminal

BREAKS = " \t\n\"'@><=;|&(:"
HOSTILE = "x $(touch pwned)"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch) -> Path:
    """A folder with scripts and runs, in which `paceline` can be typed."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "my run", "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (number, number))
    (tmp_path / "more" / "other").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.py").touch()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "paceline"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("wat", ["watch"]),
        ("help ck", ["ckpt"]),
        ("help ckpt ex", ["export"]),
        ("help watch ", []),
        ("--v", ["--version"]),
        ("ckpt i", ["import"]),
        ("nothing ", []),
        ("bench --dev", ["--device"]),
        ("bench --device ", ["auto", "cpu", "cuda"]),
        ("ckpt export --as=g", ["--as=gpt2"]),
        ("init --from ac", ["accelerate"]),
        ("data get f", ["fashion-mnist"]),
        ("train ", ["toy", "mnist", "gpt"]),
        ("train -n 2 mn", ["mnist"]),
        ("train mnist lr.b", ["lr.base="]),
        ("train mnist nor", ["norm="]),
        ("train toy nor", []),
        ("train mnist norm=", ["norm=none", "norm=batch"]),
        ("train mnist seed=1 exact=t", ["exact=true"]),
        ("train mnist --max", ["--max-restarts"]),
        ("run ", ["bin/", "more/", "runs/", "train.py"]),
        ("run .", [".hidden.py"]),
        ("run -n 2 train.py batch.l", ["batch.lanes="]),
        ("run train.py notes", ["notes.txt"]),
        ("run train.py --c", ["--config"]),
        ("run train.py --config no", ["notes.txt"]),
        ("run train.py runs=mo", ["runs=more/"]),
        ("verify m", ["more/", "mnist"]),
        ("watch ", ["new", "my run", "old"]),
        ("watch runs/n", ["runs/new/"]),
        ("watch --runs more ", ["other"]),
        ("report new ", ["my run", "old"]),
        ("ckpt list o", ["old"]),
        ("completion z", ["zsh"]),
    ],
)  # fmt: skip
def test_what_may_stand_at_the_cursor(line: str, found: list[str]) -> None:
    assert [word for word, _ in complete.candidates(line.split(" "))] == found


def test_every_verb_is_offered_with_its_help() -> None:
    offered = dict(complete.candidates([""]))
    assert {*COMMANDS} == {*offered} - {"help"}
    assert offered["watch"] == COMMANDS["watch"].help


def test_a_name_is_never_run_by_the_shell(capsys) -> None:
    for name in (HOSTILE, "red\x1b[31m", "two\nlines"):
        (Path("runs") / name).mkdir()
    for quote, offered in (("", ["x\\ \\$\\(touch\\ pwned\\) "]), ('"', [])):
        assert run_verb(["--complete", "bash", f"paceline watch {quote}x", BREAKS]) == 0
        assert capsys.readouterr().out.splitlines() == offered
    assert run_verb(["--complete", "zsh", "watch", ""]) == 0
    assert capsys.readouterr().out.splitlines() == [HOSTILE, "new", "my run", "old"]


def test_the_table_of_verbs_is_part_of_the_package() -> None:
    table = Path(complete.__file__).with_name("completion.json")
    assert list(json.loads(table.read_text())["verbs"]) == list(COMMANDS)


@pytest.fixture(params=["bash", "zsh"])
def shell(request, desk: Path) -> Iterator[Terminal]:
    """An interactive shell that has loaded its script in the documented way."""
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    plain = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[name]
    env = {"TERM": "dumb", "PS1": "ready> ", "HOME": str(desk), "ZDOTDIR": str(desk)}
    with program_in_terminal([name, *plain], folder=desk, env=env) as terminal:
        terminal.wait_for(lambda: "ready> " in terminal.written)
        terminal.type_line(f"source <(paceline completion {name})")
        terminal.wait_for(lambda: terminal.written.count("ready> ") > 1)
        yield terminal


def test_the_tab_key_completes_in_a_shell(shell: Terminal) -> None:
    for typed, completed in (
        ("paceline wat\t", "paceline watch "),
        ("paceline ckpt export --a\tg\t", "paceline ckpt export --as gpt2 "),
        ("paceline train mnist lr.b\t1 paral\td\t", "paceline train mnist lr.base=1 parallel=ddp "),
        ("paceline watch my\t", "paceline watch my\\ run "),
        ("paceline run tr\t", "paceline run train.py "),
    ):
        shell.written = ""
        shell.type_keys(typed)
        last = completed.split()[-1]  # readline may draw a line anew in parts
        shell.wait_for(lambda: shell.written.replace("\a", "").endswith(f"{last} "))  # noqa: B023
        shell.type_keys("\x15")


def test_fish_completes(desk: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    lines = ["paceline wat", "paceline train mnist lr.b", "paceline watch my", "paceline run tr"]
    asked = "; ".join(f"complete -C '{line}'" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"paceline completion fish | source; {asked}"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(desk)}, check=True,
    )  # fmt: skip
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        "watch", "lr.base=", "my run", "train.py",
    ]  # fmt: skip
