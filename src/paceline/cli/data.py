"""`paceline data check` and `paceline data show`: verify a dataset, and show its content."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.terminal import fit, plain
from paceline.units import human_size

_BAR_WIDTH = 24
_LINE_EVERY_S = 5.0
_PICTURE_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Reads all shards and compares them with the checksums of the index."""

    folder: Path = positional(metavar="FOLDER")
    """Folder of the dataset."""
    json: bool = False
    """Print the result as JSON."""


def check(arguments: CheckArguments) -> int:
    """Check the dataset; return 0 if it is intact, else 1."""
    from paceline.data.shards.check import check_dataset
    from paceline.data.shards.show import facts_of

    folder, bar = arguments.folder, Progress(quiet=arguments.json)
    result = check_dataset(folder, bar)
    bar.clear()
    code = 0 if result.ok else 1
    if arguments.json:
        problems = [problem._asdict() for problem in result.problems]
        facts = {"where": str(folder), "ok": result.ok, "problems": problems}
        _print_json(facts | {"strays": result.strays})
        return code
    for problem in result.problems:
        print(plain(f"{folder / problem.file}: {problem.what}"))
    for name in result.strays:
        print(f"{plain(str(folder / name))} does not belong to the dataset")
    if result.ok and result.index:
        print(f"{folder}: ok: {summary_of(facts_of(result.index))}")
    else:
        print(f"{folder}: not ok: {_count(len(result.problems), 'problem')}")
    return code


@dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """For an HDF5 file it shows the layout, and its cost when samples are read in random order."""

    folder: Path = positional(metavar="DATASET")
    """Folder of the dataset, or an HDF5 file."""
    sample: str = option("0", metavar="N,N")
    """Indices of the samples to show."""
    json: bool = False
    """Print the result as JSON."""


def show(arguments: ShowArguments) -> int:
    """Show the dataset or the HDF5 file; return the exit code."""
    from paceline.data.hdf5.file import is_hdf5

    samples = _indices(arguments.sample)
    if is_hdf5(str(arguments.folder)):
        return _show_hdf5(arguments)
    return _show_dataset(arguments, samples)


def _indices(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(
            f"--sample {text!r} is not a list of sample indices", fix="for example: --sample 0,5"
        )
    return [int(part) for part in parts]


def _show_hdf5(arguments: ShowArguments) -> int:
    from paceline.data.hdf5.chunks import inspect

    findings = inspect(arguments.folder)
    if arguments.json:
        datasets = [finding.facts() for finding in findings]
        _print_json({"where": str(arguments.folder), "datasets": datasets})
        return 0
    for finding in findings:
        for line in str(finding).splitlines():
            print(plain(line))
    return 0


def _show_dataset(arguments: ShowArguments, samples: list[int]) -> int:
    from paceline.data.shards.check import open_index
    from paceline.data.shards.show import facts_of, preview_of, read_sample

    folder = arguments.folder
    index = open_index(folder)
    facts = facts_of(index)
    columns = {column.name: column for column in index.columns}
    shown: dict[int, list[Any]] = {}
    for number in samples:
        values = read_sample(folder, index, number)
        shown[number] = [preview_of(folder, index, columns[name], values[name]) for name in values]
    if arguments.json:
        texts = {}
        for number, looks in shown.items():
            texts[str(number)] = {look.column: look.words for look in looks}
        _print_json({"where": str(folder)} | dict(facts) | {"shown": texts})
        return 0
    width = shutil.get_terminal_size().columns
    print("\n".join(_columns_of(folder, facts, width)))
    for number, looks in shown.items():
        print(f"\nsample {number:,}")
        for each in looks:
            print("\n".join(_value_lines(each, width)))
    return 0


def summary_of(facts: Mapping[str, Any]) -> str:
    """Return samples, columns, shards and size in one phrase."""
    names = ", ".join(plain(column["name"]) for column in facts["columns"])
    samples, shards = _count(facts["samples"], "sample"), _count(facts["shards"], "shard")
    return f"{samples} of {names} in {shards}, {human_size(facts['size_bytes'])}"


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def _columns_of(folder: Path, facts: Mapping[str, Any], width: int) -> list[str]:
    """Return a summary, the columns, and the notes of the packer."""
    lines = [f"{folder}: {summary_of(facts)}, {facts['samples_per_shard']:,} per shard"]
    longest = max(len(plain(column["name"])) for column in facts["columns"])
    for column in facts["columns"]:
        shape = "of varying length" if column["varying"] else str(column["shape"] or "")
        lines.append(f"  {plain(column['name']):<{longest}}  {column['type']} {shape}".rstrip())
    for name, value in facts["about"].items():
        lines.append(fit(f"  {name}: {json.dumps(value, ensure_ascii=False)}", width))
    return lines


def _value_lines(look: Any, width: int) -> list[str]:
    """Return one value of a sample; an image is drawn."""
    text = f"  {look.column}: {look.words}"
    if look.picture is None:
        return [fit(text, 4 * width)]
    from paceline.data.shards.show import draw

    picture = draw(look.picture, min(_PICTURE_WIDTH, width - 4), _colours())  # type: ignore[arg-type]
    return [fit(text, width), *(f"    {line}" for line in picture)]


def _colours() -> str:
    if not sys.stdout.isatty() or os.environ.get("TERM", "") == "dumb":
        return "none"
    if "NO_COLOR" in os.environ:
        return "none"
    return "24-bit" if os.environ.get("COLORTERM", "") in {"truecolor", "24bit"} else "grey"


class Progress:
    """A progress bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._bar, self._width = quiet, sys.stdout.isatty(), 0
        self._last_line_s = time.monotonic()

    def __call__(self, task: str, done: int, total: int) -> None:
        """Show how much of a task is done."""
        if self._quiet:
            return
        if self._bar:
            filled = _BAR_WIDTH * done // max(1, total)
            text = f"{'━' * filled}{'·' * (_BAR_WIDTH - filled)} {task} {done:,}/{total:,}"
            sys.stdout.write(text.ljust(self._width) + "\r")
            self._width = len(text)
        elif done < total and time.monotonic() - self._last_line_s > _LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            print(f"{task}: {done:,} of {total:,}")
        sys.stdout.flush()

    def clear(self) -> None:
        """Erase the bar."""
        if self._width:
            sys.stdout.write(" " * self._width + "\r")
            self._width = 0


def _print_json(facts: Mapping[str, Any]) -> None:
    print(json.dumps(facts, indent=2))
