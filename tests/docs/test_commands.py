"""Every command of every page: its verb, options, settings, scripts and targets exist, and each whole one is typed on some page.

`make test` types the most-read pages, and `make test-all` every page: test_readme.py, test_guides.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.cli.commands import COMMANDS, load
from paceline.config import RunConfig
from paceline.config.arguments import arguments_of
from paceline.config.command_line import split_command
from paceline.config.values import field_types
from paceline.recipes import RECIPES
from support.processes import run_on_processes
from support.typed_pages import NOT_HERE, ROOT, Page, is_whole, page_of

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
    "torchrun --standalone --nproc-per-node 2 before.py": "needs accelerate: below",
    "python before.py": "needs lightning: below",
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


def test_every_whole_command_is_typed_on_some_page() -> None:
    others = tuple(NOT_HERE) + tuple(NOT_TYPED)
    left = [words for words in ASIDES if is_whole(words) and words not in TYPED]
    assert [words for words in left if not words.startswith(others) and not re.fullmatch(LONG, words)] == []  # fmt: skip
    assert set(NOT_TYPED) <= set(ASIDES)


def test_verbs_options_settings_scripts_and_targets_of_every_page_exist() -> None:
    settings = {*field_types(RunConfig)}
    for recipe in RECIPES:
        module = __import__(f"paceline.recipes.{recipe}", fromlist=["x"])
        settings |= {*field_types(getattr(module, f"{recipe.capitalize()}Config"))}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for page in PAGES:
        typed = [command.words for turn in page.turns for command in turn]
        for words in {*typed, *page.asides}:
            wrong += [f"{page.name}: {words}: {one}" for one in unknown(words, page, settings)]
        made = re.findall(r"(?:^\$ |`)make ([\w-]+)", page.text, re.MULTILINE)
        wrong += [f"{page.name}: make {target}" for target in made if target not in targets]
        scripts = re.findall(r"\b((?:scripts|benchmarks|examples)/[\w/]+\.py)\b", page.text)
        wrong += [f"{page.name}: {name}" for name in scripts if not (ROOT / name).exists()]
    assert wrong == []


def unknown(words: str, page: Page, settings: set[str]) -> Iterator[str]:
    """Yield what a command line of a page names and the program does not know."""
    program, *given = shlex.split(words.partition(" > ")[0].replace("|", " "), comments=True)
    if program != "paceline" or not given or given[0].startswith(("-", "V")) or given[0] == "help":
        return
    verb, *rest = given
    command = COMMANDS.get(verb)
    if command is not None and command.actions and rest and rest[0].isalpha():
        command, rest = command.actions.get(rest[0]), rest[1:]
    if command is None:
        yield verb
        return
    if command.actions:
        return
    arguments = arguments_of(load(command)[1])
    known = {flag for one in arguments for flag in one.flags} | {"--help"}
    own, others = split_command(arguments, rest)
    yield from (word for word in own if word.startswith("--") and word.partition("=")[0] not in known)  # fmt: skip
    fields = set(re.findall(r"^    (\w+): ", "".join(page.scripts.values()), re.MULTILINE))
    names = [name for name, given, _ in (word.partition("=") for word in others) if given]
    yield from (name for name in names if name not in settings | fields)


def test_what_takes_long_says_how_it_is_used(tmp_path: Path) -> None:
    paths = sorted({found[1] for words in ASIDES if (found := re.fullmatch(LONG, words))})
    (said,) = run_on_processes(helps_of, 1, tmp_path, {}, {"scripts": paths})
    assert [path for path in paths if not said[path].startswith(f"usage: {Path(path).name}")] == []


def helps_of(scripts: list[str]) -> dict[str, str]:
    """Return what each `python SCRIPT --help` prints; they run in this process."""
    found, paths = {}, [*sys.path]
    for script in scripts:
        sys.argv = [script, "--help"]
        sys.path[:] = [str((ROOT / script).parent), *paths]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        found[script] = said.getvalue()
    return found


CONVERTED = {"from-accelerate": "accelerate", "from-hf-trainer": "accelerate", "from-lightning": "lightning"}  # fmt: skip
"""The pages with a script of another library, and the package that it needs."""


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize(("name", "package"), CONVERTED.items())
def test_a_script_runs_before_it_is_converted(name: str, package: str, tmp_path: Path) -> None:
    if not find_spec(package):
        pytest.skip(f"{package} is not installed; the page has its results")
    script = tmp_path / "before.py"
    page = next(page for page in PAGES if page.name.endswith(f"{name}.md"))
    script.write_text(page.scripts["before.py"])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = [] if package == "lightning" else torchrun  # which starts its processes itself
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bacc\b|eval_acc", done.stdout + done.stderr)


def test_a_platform_that_is_refused_is_refused_at_the_first_import() -> None:
    script = "import difflib, sys; sys.platform = 'win32'; import paceline"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "EnvironmentUnfit" in done.stderr and "Windows" in done.stderr and "WSL 2" in done.stderr
