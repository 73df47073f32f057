"""Commands in sentences and tables: each is run on some page, or this file says why not; and its options exist."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from support.processes import run_on_processes
from support.typed_pages import NOT_HERE, ROOT, is_whole, page_of

RECORD = "notes.md"
"""Experiments, with the commands of their time."""
PAGES = [
    page_of(path)
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    if path.name != RECORD
]
TYPED = {command.words for page in PAGES for turn in page.turns for command in turn}
ASIDES = sorted({words for page in PAGES for words in page.asides})
LONG = r"python ((?:benchmarks|scripts)/\S+\.py)(?: FILE)?"
"""Measurements of minutes to hours; their results are recorded."""
NOT_TYPED = {
    "torchrun --standalone --nproc-per-node 2 before.py": "needs accelerate: test_before.py",
    "python before.py": "needs lightning: test_before.py",
    "paceline completion fish > ~/.config/fish/completions/paceline.fish": "writes into the home directory; tests/cli/test_completion.py loads the script",
    "paceline data get mnist": "downloads, and tests download nothing",
    "paceline train mnist data=mnist": "needs a downloaded dataset; tests/recipes trains on a small one",
    "paceline verify --worlds 1,2,4,8,16 mnist batch.lanes=16 batch.global_size=512 threads=1": "takes a minute; the README runs it for 1 to 4 ranks",
    "paceline scale --worlds 1,2,4,8,16 --steps 10 --warmup 3 --rounds 2 mnist batch.lanes=16 batch.global_size=512 threads=1": "takes minutes; tests/measure",
    'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 '
    "/usr/bin/python3 /shared/env/venv-0123456789ab.py": "is printed by `--pack`; tests/doctor unpacks",
    "paceline lesson --check --all": "grades for minutes; tests/course grades a few",
    "paceline lesson --check --all --json > ada.json": "grades for minutes; tests/course grades a few",
    "paceline lesson --grades ada.json bob.json": "needs those files; tests/course makes them",
    "source /tmp/paceline-1000/venv-0123456789ab/bin/activate": "is printed by `--pack`",
}


def test_every_whole_command_is_typed_on_some_page():
    others = tuple(NOT_HERE) + tuple(NOT_TYPED)
    left = [words for words in ASIDES if is_whole(words) and words not in TYPED]
    assert [
        words for words in left if not words.startswith(others) and not re.fullmatch(LONG, words)
    ] == []


def test_what_is_not_typed_is_still_on_a_page():
    assert set(NOT_TYPED) <= set(ASIDES)


@pytest.mark.parametrize(
    "path", sorted({found[1] for words in ASIDES if (found := re.fullmatch(LONG, words))})
)
def test_what_takes_long_says_how_it_is_used(path, tmp_path):
    (said,) = run_on_processes(help_of, 1, tmp_path, {}, {"script": str(ROOT / path)})
    assert said.startswith(f"usage: {Path(path).name}")


def help_of(script: str) -> str:
    """Return the output of `python SCRIPT --help`; it runs in this process."""
    sys.argv = [script, "--help"]
    sys.path.insert(0, str(Path(script).parent))
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def test_verbs_and_options_in_sentences_are_real():
    known = (ROOT / "docs" / "reference" / "verbs.md").read_text()
    wrong = []
    for words in ASIDES:
        program, *rest = words.split()
        if program != "paceline" or not rest:
            continue
        section = re.search(rf"^## .*\b{rest[0]}\b.*?(?=^## |\Z)", known, re.DOTALL | re.MULTILINE)
        options = [word for word in rest[1:] if word.startswith("--")]
        if not section or any(not re.search(rf"`{word}[` ]", section[0]) for word in options):
            wrong.append(words)
    assert wrong == []
