"""`paceline init`: write a training script with three places to change."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from paceline import terminal
from paceline.cli.init_origins import ORIGINS, Origin
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError, did_you_mean
from paceline.rundir import writing_to

_FILE = "train.py"
_MARKS = {"model": "# 1. ", "data": "# 2. ", "loss": "# 3. "}


@dataclass(frozen=True, kw_only=True)
class InitArguments:
    """The script trains a digit classifier as it is. Model, data and loss are marked: replace them with your own."""

    path: str = positional(_FILE, metavar="FILE|FOLDER")
    """File to write, which ends with .py, or the folder for train.py (default: train.py)."""
    origin: str = option("", "--from", metavar="LIBRARY")
    """Library that you come from (torchrun, accelerate, lightning, fabric, hf): show which call replaces which, and note it in the script. If FILE is a script of that library, show its lines with what replaces them, and write nothing."""
    force: bool = False
    """Overwrite an existing file."""


def main(arguments: InitArguments) -> int:
    """Write the script; print what to change and what to type next."""
    origin = _origin(arguments.origin)
    file = file_of(arguments.path)
    existed = file.exists()
    if origin and existed and not arguments.force and (lines := _lines_to_replace(origin, file)):
        print(f"lines of {terminal.plain(str(file))} and what replaces them; nothing was written\n")
        terminal.table(["line", "in your script", "here you write"], lines, numeric=["line"])
        print(f"\na whole script: paceline init OTHER.py; guide: {origin.guide}")
        return 0
    _write(file, script_text(file.stem, origin), force=arguments.force)
    print(f"{'overwrote' if existed else 'wrote'} {terminal.plain(str(file))}")
    print("change three places: 1. the model, 2. the data, 3. the loss\n")
    if origin:
        rows = [(each.there, each.here) for each in origin.replacements]
        terminal.table([f"in {origin.name} you write", "here you write"], rows)
        print(f"\nguide: {origin.guide}\n")
    for line in next_commands(file):
        print(line)
    return 0


def _lines_to_replace(origin: Origin, file: Path) -> list[tuple[str, str, str]]:
    """Return the lines of another library in a script that does not use Paceline yet."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^\s*(import|from) paceline\b", text, re.MULTILINE) and "paceline.Run(" in text:
        return []
    return [(str(number), code, here) for number, code, here in origin.lines_of(text)]


def _origin(name: str) -> Origin | None:
    if name and name not in ORIGINS:
        raise ConfigError(
            f"--from must be one of {', '.join(ORIGINS)}; got {name!r}",
            fix=did_you_mean(name, ORIGINS),
        )
    return ORIGINS.get(name)


def file_of(path: str) -> Path:
    """Return the file to write.

    >>> str(file_of("digits")), str(file_of("digits/own.py")), str(file_of("."))
    ('digits/train.py', 'digits/own.py', 'train.py')
    """
    target = Path(path)
    return target if target.suffix == ".py" and not target.is_dir() else target / _FILE


def script_text(name: str, origin: Origin | None = None) -> str:
    """Return the script of a run name, with the calls of another library as comments at the marked places."""
    text = files("paceline.recipes").joinpath("starter.py").read_text(encoding="utf-8")
    text = text.replace('name: str = "starter"', f"name: str = {json.dumps(name)}")
    if origin is None:
        return text
    for each in origin.replacements:
        if each.place:
            comment = f"#    In {origin.name}: {each.there}. Here: {each.here}."
            text = _with_comment(text, _MARKS[each.place], comment)
    return text


def _with_comment(text: str, mark: str, comment: str) -> str:
    """Return the script with a line below a mark."""
    before, found, after = text.partition(f"\n{mark}")
    marked, _, rest = after.partition("\n")
    return f"{before}{found}{marked}\n{comment}\n{rest}"


def _write(file: Path, text: str, *, force: bool) -> None:
    with writing_to(file, "name another file: paceline init FILE"):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("w" if force else "x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{file} exists, and was not changed",
                fix=f"name another file: paceline init OTHER.py, or overwrite it: paceline init --force {shlex.quote(str(file))}",
            ) from None


def next_commands(file: Path) -> list[str]:
    r"""Return commands that use the script, each with its purpose.

    >>> print(*next_commands(Path("a b.py")), sep="\n")
    try it              python 'a b.py' steps=5
    on two processes    paceline run -n 2 'a b.py'
    the same bits?      paceline verify 'a b.py'
    its settings        python 'a b.py' --help
    """
    name = shlex.quote(str(file))
    commands = {
        "try it": f"python {name} steps=5",
        "on two processes": f"paceline run -n 2 {name}",
        "the same bits?": f"paceline verify {name}",
        "its settings": f"python {name} --help",
    }
    return [f"{purpose:<20}{terminal.plain(command)}" for purpose, command in commands.items()]
