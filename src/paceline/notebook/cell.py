"""A cell as a script: its arguments, its file, and its launch."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.run import HostArguments, LaunchArguments
from paceline.config.arguments import arguments_of, option, verbatim
from paceline.config.command_line import read_arguments, split_command
from paceline.errors import ConfigError
from paceline.launch.spec import Program, script
from paceline.main_script import MainScript
from paceline.rundir import make_private, write_whole, writing_to

MAGIC = "%%paceline"
_FOLDER = "cells"
_NAME = "cell"
_HASH_DIGITS = 8
_END = ""  # no word of a line is empty unless it is quoted


@dataclass(frozen=True, kw_only=True)
class CellArguments(HostArguments, LaunchArguments):
    """The cell is kept as a file in runs/cells and runs in new processes, which see no variable of the notebook."""

    python: str = option("", metavar="PATH")
    """Python interpreter of the ranks (default: the one of the kernel)."""
    settings: tuple[str, ...] = verbatim("SETTING=VALUE")
    """Settings of the script. All words from the first one on are passed to the script unchanged."""

    def setting(self, name: str, default: str) -> str:
        """Return the value of a word NAME=VALUE for the script; the last one counts."""
        given = [word.partition("=") for word in self.settings]
        return {key: value for key, _, value in given if value}.get(name, default)


def read_line(line: str) -> CellArguments:
    """Return the arguments on the line of the magic.

    >>> read_line("-n 2 name=x seed=3 -n 4").ranks, read_line("-n 2 name=x seed=3 -n 4").settings
    ('2', ('name=x', 'seed=3', '-n', '4'))
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{MAGIC} {line}: {error}", fix="close the quotation mark") from error
    options, settings = _split(words)
    return replace(read_arguments(CellArguments, options, MAGIC), settings=tuple(settings))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of the launch, and the words for the script.

    >>> _split(["-n", "2"]), _split(["a=1"]), _split(["-n", "2", "--", "--help"])
    ((['-n', '2'], []), ([], ['a=1']), (['-n', '2'], ['--help']))
    """
    # The first word that is neither an option nor its value stands where `paceline run` has the script.
    before, after = split_command(arguments_of(CellArguments), [*words, _END])
    return before[:-1], [*before[-1:], *after][:-1]


def write_script(cell: str, line: str, arguments: CellArguments) -> Program:
    """Keep a cell as a file that is not overwritten by other cells; return it as a program.

    The magic's line is a comment there, so that line numbers are those of the cell.
    """
    text = f"# cell {line}".rstrip() + f"\n{cell}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
    file = Path(arguments.setting("runs", "runs")) / _FOLDER / f"{_name(arguments)}-{digest}.py"
    with writing_to(file, "change the folder of the notebook with %cd"):
        make_private(file.parent)
        write_whole(file, text.encode())
    cell_script = MainScript(_NAME, f"{_NAME}.py", str(Path.cwd()))
    return replace(
        script(str(file), arguments.python), told=cell_script.told_of(str(file.absolute()))
    )


def named_by_run(program: Program, arguments: CellArguments) -> Program:
    """Return the program under the name that its run folder has, if the launcher keeps one."""
    return replace(program, name=f"{_name(arguments)}.py")


def _name(arguments: CellArguments) -> str:
    """Return the name of the run as a file name; the script itself refuses a bad one."""
    return arguments.setting("name", _NAME).replace("/", "-")
