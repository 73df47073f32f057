"""Does Paceline work with other versions of Python and torch? Each pair gets an environment of its own, one at a time.

    python scripts/torch_versions.py --write python3.11:2.13.0 python3.12:newest

A pair is an interpreter and a version of torch: a number, `oldest` (of pyproject.toml) or `newest` (of pip's index).
Without pairs the present environment is tested as it is. Each pair installs torch with all it requires (up to 6 GB),
runs a core of the tests, then trains on two ranks and counts the lines that any rank prints with a warning. The
environment is deleted afterwards, unless --keep is given. --write puts the rows into docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from xml.etree import ElementTree as Xml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
NEEDS = ("pytest", "pytest-timeout", "hypothesis")
CORE = (
    "tests/train/test_run.py",
    "tests/train/test_update.py",
    "tests/train/test_lane_sum.py",
    "tests/train/test_fsdp.py",
    "tests/train/test_resume.py",
    "tests/checkpoint/test_restore.py",
    "tests/verify/test_verify.py::test_a_right_script_has_the_same_bits_in_every_world_and_through_a_resume",
    "tests/launch/test_foreign_scripts.py::test_each_rank_gets_the_variables_of_torchrun",
    "tests/launch/test_foreign_scripts.py::test_a_script_with_init_process_group_alone_joins",
    "tests/launch/test_foreign_scripts.py::test_a_script_need_not_close_its_files_nor_free_its_model",
)
TRAININGS = ((), ("exact=false",), ("parallel=fsdp",))
TABLE = re.compile(
    r"(?<=<!-- made by scripts/torch_versions.py -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL
)


@dataclass(frozen=True)
class Row:
    """What one pair gave: a row of the table."""

    python: str
    torch: str
    passed: int
    failed: int
    skipped: int
    warnings: int
    date: str

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, astuple(self)))} |"


def main() -> int:
    """Test all pairs; return 1 if a test failed or a rank printed a warning."""
    known = _arguments()
    rows = []
    for pair in known.pairs or [""]:
        rows.append(row_of(pair, keep=known.keep))
        print(table(rows), flush=True)
        if known.write:
            text = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(with_rows(text, rows), encoding="utf-8")
    return int(any(row.failed or row.warnings for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", metavar="PYTHON:TORCH")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    return parser.parse_args()


def row_of(pair: str, *, keep: bool) -> Row:
    """Return the row of a pair; the empty one is the present environment."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-torch-"))
    try:
        python = install(pair, folder / "env") if pair else Path(sys.executable)
        versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
        found = _output(python, "-c", versions).split()
        counts = run_tests(python, folder / "results.xml")
        return Row(*found, *counts, count_warnings(python, folder), time.strftime("%Y-%m-%d"))
    finally:
        if keep:
            print(f"kept {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def install(pair: str, folder: Path) -> Path:
    """Make an environment with this torch, Paceline and what its tests need; return its interpreter."""
    base, _, torch = pair.partition(":")
    subprocess.run([base, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    subprocess.run([*pip, "setuptools>=77", requirement(torch)], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", ROOT, *NEEDS], check=True)
    return python


def requirement(torch: str) -> str:
    """Return what pip installs.

    >>> requirement("2.13.0"), requirement("newest")
    ('torch==2.13.0', 'torch')
    """
    if torch == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        (needed,) = (one for one in project["dependencies"] if one.startswith("torch>="))
        return needed.replace(">=", "==") + ".*"
    return "torch" if torch == "newest" else f"torch=={torch}"


def run_tests(python: Path, results: Path) -> tuple[int, int, int]:
    """Run the core; return the numbers of tests that passed, failed and were skipped."""
    command = [python, "-m", "pytest", "-q", f"--junitxml={results}", *CORE]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code > 1:  # a test that failed is counted; one that does not exist any more is not
        sys.exit(f"pytest ended with code {code}: no result")
    return counts_of(results.read_text(encoding="utf-8"))


def counts_of(results: str) -> tuple[int, int, int]:
    """Return passed, failed and skipped of pytest's XML.

    >>> counts_of('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="1"/></testsuites>')
    (5, 3, 1)
    """
    suite = Xml.fromstring(results)[0]  # noqa: S314 - pytest wrote it just now
    tests, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors, skipped


def count_warnings(python: Path, folder: Path) -> int:
    """Train on two ranks, each way; return how many lines of all ranks contain a warning."""
    found = []
    for number, settings in enumerate(TRAININGS):
        where = ("steps=8", "log.ranks=all", f"runs={folder / 'runs'}", f"name=run{number}")
        text = _output(python, "-m", "paceline", "train", "mnist", "-n", "2", *settings, *where)
        found += warning_lines(text)
    for log in sorted((folder / "runs").glob("*/ranks/*.log")):
        found += warning_lines(log.read_text(encoding="utf-8"))
    for line in dict.fromkeys(found):
        print(f"{found.count(line)} x {line}", file=sys.stderr)
    return len(found)


def warning_lines(text: str) -> list[str]:
    r"""Return the lines that announce a warning.

    >>> warning_lines("step 1\na.py:3: FutureWarning: f is deprecated\n  f()\n")
    ['a.py:3: FutureWarning: f is deprecated']
    """
    return [line for line in text.splitlines() if re.search(r"\b\w*Warning: ", line)]


def _output(python: Path, *arguments: str) -> str:
    """Return stdout and stderr of a command that must succeed."""
    command = [python, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(
            f"error: exit code {done.returncode}: {' '.join(map(str, command))}\n{done.stdout}"
        )
    return done.stdout


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    names = [field.name for field in fields(Row)]
    head = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*head, *map(str, rows)]) + "\n"


def with_rows(page: str, rows: Sequence[Row]) -> str:
    """Return a page with these rows: each replaces the row of the same versions, or is added in order."""
    (old,) = TABLE.findall(page)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in old.splitlines()[2:]]
    known = {tuple(row[:2]): "| " + " | ".join(row) + " |" for row in cells}
    known |= {(row.python, row.torch): str(row) for row in rows}
    lines = [known[key] for key in sorted(known, key=_by_number)]
    return TABLE.sub(lambda _: table([]) + "".join(f"{line}\n" for line in lines), page)


def _by_number(versions: tuple[str, ...]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", " ".join(versions))]


if __name__ == "__main__":
    sys.exit(main())
