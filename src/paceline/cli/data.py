"""Sets of samples in shards: pack one from files, check every byte of it, show what is inside, get a known one, bench reading."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, did_you_mean
from paceline.terminal import fit, plain
from paceline.units import human_size

HELP = "sets of samples: pack files into shards, check them, show what is inside, get known ones, measure reading"

_MODULES = {"get": "download", "bench": "bench"}
_ELSEWHERE = {
    "get": "fetch a known set: mnist, fashion-mnist, tinyshakespeare",
    "bench": "measure how fast a set is read",
}
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_BAR_WIDTH = 24
_SAY_EVERY_S = 5.0
_PICTURE_WIDTH = 64


class _Later(argparse.ArgumentParser):
    """A parser of an action that has its arguments in a module of its own, which other verbs need not import."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Ask the module for its arguments, then parse."""
        if self.module:
            importlib.import_module(self.module).add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done, each with its own arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=_Later)
    own = {
        "pack": (_pack, _add_pack_arguments),
        "check": (_check, _add_folder),
        "show": (_show, _add_show_arguments),
    }
    for name, (act, add) in own.items():
        action = actions.add_parser(
            name, help=act.__doc__, description=act.__doc__, allow_abbrev=False
        )
        add(action)
        action.set_defaults(act=act, parser=action)
    for name, help_text in _ELSEWHERE.items():
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        action.module = f"paceline.data.{_MODULES[name]}"
        action.set_defaults(act=_elsewhere, module=action.module, parser=action)
    parser.set_defaults(parser=parser)


def main(known: argparse.Namespace) -> int:
    """Do what was asked."""
    if not hasattr(known, "act"):
        raise ConfigError(
            "data: what is to be done?", fix="use one of: pack, check, show, get, bench"
        )
    if known.arguments:
        word = known.arguments[0]
        options = [one for action in known.parser._actions for one in action.option_strings]  # noqa: SLF001 - no public way
        fix = did_you_mean(word, options) if word.startswith("-") else "take it out"
        raise ConfigError(f"unexpected {word!r}", fix=fix)
    done: int = known.act(known)
    return done


def _elsewhere(known: argparse.Namespace) -> int:
    done: int = importlib.import_module(known.module).main(known)
    return done


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of a set")
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="SET", help="the folder of a set, or an HDF5 file"
    )
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument(
        "--sample",
        type=_numbers,
        default=[0],
        metavar="N,N",
        help="show these samples (default: 0, the first)",
    )


def _add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="files or a folder: arrays (x.npy, x.npz, image=a.npy label=b.npy), MNIST's IDX files, HDF5, CLASS/x.png, texts, CSV, Parquet")  # fmt: skip
    add(
        "--to", type=Path, required=True, metavar="FOLDER", help="the folder of the set; it is made"
    )
    add(
        "--shard",
        type=_size,
        default="32MB",
        metavar="SIZE",
        help="about how large a shard is (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes (default: one a core); they change no byte",
    )
    add("--columns", type=_names, default=(), metavar="A,B", help="only these columns, in this order; else all, a label last")  # fmt: skip
    add("--part", default="", metavar="train|test", help="of MNIST (default: train)")
    add("--size", type=_height_and_width, default=(0, 0), metavar="HxW", help="decode images and bring them to this height and width; else their files are packed as they are")  # fmt: skip
    add("--grey", action="store_true", help="one value a pixel, not three")
    add("--as", dest="text", default="", metavar="bytes|characters|tokens", help="what an element of a text is (default: bytes); says that the input is text")  # fmt: skip
    add("--tokenizer", default="", metavar="FILE", help="make tokens with this tokenizer.json")
    add("--train-tokenizer", type=int, default=0, metavar="VOCAB", help="train a byte-level BPE tokenizer of so many tokens on the input")  # fmt: skip
    add("--length", type=int, default=0, metavar="T", help="join the texts and cut rows of T+1 elements, the last of which begins the next row; else a row per file")  # fmt: skip
    add(
        "--force", action="store_true", help="write over a set, or over what another pack has begun"
    )
    add("--json", action="store_true", help="print the result as JSON")


def _size(text: str) -> int:
    """Return a number of bytes.

    >>> _size("32MB"), _size("1.5 GiB"), _size("4096")
    (32000000, 1610612736, 4096)
    """
    digits = text.rstrip(" abcgikmABCGIKM")
    unit = text[len(digits) :].strip().lower()
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"--shard {text!r} is not a size", fix="give one such as --shard 32MB")
    return size


def _height_and_width(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ConfigError(
            f"--size {text!r} is not a height and a width", fix="give both, as in --size 28x28"
        )
    return int(sides[0]), int(sides[1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(
            f"--sample {text!r} is not a list of samples",
            fix="give their numbers, as in --sample 0,5",
        )
    return [int(word) for word in words]


def _pack(known: argparse.Namespace) -> int:
    """Make a set of shards from files; interrupted, the same command goes on."""
    from paceline.data.pack import PackRequest, pack
    from paceline.data.pack.request import FLAGS
    from paceline.data.shards.show import facts_of

    if known.workers < 0:
        raise ConfigError(
            f"--workers {known.workers} is too few", fix="give 1 or more, or leave it out"
        )
    options = {name: getattr(known, name) for name in FLAGS}
    request = PackRequest(tuple(known.input), known.shard, **options)
    begun, line = time.monotonic(), _Progress(quiet=known.json)
    try:
        index = pack(request, known.to, workers=known.workers, force=known.force, progress=line)
    except KeyboardInterrupt:
        line.clear()
        print(f"interrupted; the same command goes on in {known.to}", file=sys.stderr)
        return 130
    finally:
        line.clear()
    seconds = time.monotonic() - begun
    if known.json:
        _print_json(
            {"where": str(known.to)} | dict(facts_of(index)) | {"seconds": round(seconds, 3)}
        )
    else:
        print(f"{known.to}: {_sentence(facts_of(index))}, in {seconds:.1f} s")
    return 0


def _sentence(facts: Mapping[str, Any]) -> str:
    names = ", ".join(plain(column["name"]) for column in facts["columns"])
    samples, shards = _count(facts["samples"], "sample"), _count(facts["shards"], "shard")
    return f"{samples} of {names} in {shards}, {human_size(facts['size_bytes'])}"


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def _check(known: argparse.Namespace) -> int:
    """Read every byte of a set, and say whether all is as it was written."""
    from paceline.data.shards.check import check_dataset
    from paceline.data.shards.show import facts_of

    line = _Progress(quiet=known.json)
    verdict = check_dataset(known.folder, line)
    line.clear()
    if known.json:
        problems = [problem._asdict() for problem in verdict.problems]
        _print_json(
            {
                "where": str(known.folder),
                "ok": verdict.ok,
                "problems": problems,
                "strays": verdict.strays,
            }
        )
        return 0 if verdict.ok else 1
    for problem in verdict.problems:
        print(plain(f"{known.folder / problem.file}: {problem.what}"))
    for name in verdict.strays:
        print(f"{plain(str(known.folder / name))} is no part of the set")
    if verdict.ok and verdict.index:
        print(f"{known.folder}: ok: {_sentence(facts_of(verdict.index))}")
    else:
        print(f"{known.folder}: not ok: {_count(len(verdict.problems), 'problem')}")
    return 0 if verdict.ok else 1


def _show(known: argparse.Namespace) -> int:
    """Say what is inside a set, with a few samples; or how an HDF5 file is laid out, and what that costs."""
    from paceline.data.hdf5.file import is_hdf5

    return _show_file(known) if is_hdf5(str(known.folder)) else _show_set(known)


def _show_file(known: argparse.Namespace) -> int:
    from paceline.data.hdf5.chunks import inspect

    findings = inspect(known.folder)
    if known.json:
        _print_json(
            {"where": str(known.folder), "datasets": [finding.facts() for finding in findings]}
        )
    else:
        print("\n".join(plain(line) for finding in findings for line in str(finding).splitlines()))
    return 0


def _show_set(known: argparse.Namespace) -> int:
    from paceline.data.shards.check import open_index
    from paceline.data.shards.show import facts_of, preview_of, read_sample

    index = open_index(known.folder)
    facts = facts_of(index)
    samples = {number: read_sample(known.folder, index, number) for number in known.sample}
    columns = {column.name: column for column in index.columns}
    looks = {
        number: [
            preview_of(known.folder, index, columns[name], value) for name, value in sample.items()
        ]
        for number, sample in samples.items()
    }
    if known.json:
        told = {
            str(number): {one.column: one.words for one in found} for number, found in looks.items()
        }
        _print_json({"where": str(known.folder)} | dict(facts) | {"shown": told})
        return 0
    width = shutil.get_terminal_size().columns
    print("\n".join(_summary(known.folder, facts, width)))
    for number, found in looks.items():
        print(f"\nsample {number:,}")
        print("\n".join(line for one in found for line in _lines(one, width)))
    return 0


def _summary(folder: Path, facts: Mapping[str, Any], width: int) -> list[str]:
    """Return what a set is, its columns, and what its packer knew besides."""
    lines = [f"{folder}: {_sentence(facts)}, {facts['samples_per_shard']:,} a shard"]
    longest = max(len(plain(column["name"])) for column in facts["columns"])
    for column in facts["columns"]:
        shape = "of varying length" if column["varying"] else str(column["shape"] or "")
        lines.append(f"  {plain(column['name']):<{longest}}  {column['type']} {shape}".rstrip())
    about = (
        f"  {name}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in facts["about"].items()
    )
    return lines + [fit(line, width) for line in about]


def _lines(look: Any, width: int) -> list[str]:
    """Return the lines of one value."""
    if look.picture is None:
        return [fit(f"  {look.column}: {look.words}", 4 * width)]
    from paceline.data.shards.show import draw

    colours = "none"
    if (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") != "dumb"
        and "NO_COLOR" not in os.environ
    ):
        colours = "24-bit" if os.environ.get("COLORTERM", "") in {"truecolor", "24bit"} else "grey"
    drawn = draw(look.picture, min(_PICTURE_WIDTH, width - 4), colours)  # type: ignore[arg-type]
    return [fit(f"  {look.column}: {look.words}", width), *(f"    {line}" for line in drawn)]


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._bar, self._wide = quiet, sys.stdout.isatty(), 0
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say how much is done."""
        if self._quiet:
            return
        if self._bar:
            filled = _BAR_WIDTH * done // max(1, total)
            text = f"{'━' * filled}{'·' * (_BAR_WIDTH - filled)} {what} {done:,}/{total:,}"
            sys.stdout.write(text.ljust(self._wide) + "\r")
            self._wide = len(text)
        elif done < total and time.monotonic() - self._said > _SAY_EVERY_S:
            self._said = time.monotonic()
            print(f"{what}: {done:,} of {total:,}")
        sys.stdout.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._wide:
            sys.stdout.write(" " * self._wide + "\r")
            self._wide = 0


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2))
