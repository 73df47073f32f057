"""`paceline verify`: compare training state, losses and metrics bit by bit between world sizes and through a resume."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline.cli.train import recipe
from paceline.config.arguments import option, positional, verbatim
from paceline.errors import ConfigError
from paceline.launch.spec import Program, script
from paceline.recipes import RECIPES
from paceline.verify.compare_worlds import verify
from paceline.verify.verdict import VerifyResult, as_dict


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Compares training state, losses and metrics, also after a resume; finds the cause of a difference by experiments."""

    script: str = positional(metavar="SCRIPT")
    """Script to run, or the name of a recipe."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script, such as settings (key=value). Options of paceline come before SCRIPT."""
    worlds: str = option("1,2,3,4", metavar="N,N")
    """World sizes to compare; the first is the reference."""
    steps: int = 0
    """Steps to compare; 0: to the first step of the third epoch, with epochs of more than 4 steps cut to 4; 8 steps of a run of one epoch."""
    json: bool = False
    """Print the result as JSON."""


def main(arguments: VerifyArguments) -> int:
    """Compare the world sizes; return 0 for identical bits, 1 for a difference."""
    check_at_least(0, "--steps", arguments.steps)
    result: VerifyResult = verify(
        program_from(arguments.script),
        worlds_from(arguments.worlds),
        arguments.steps,
        arguments.script_arguments,
        progress(quiet=arguments.json),
        show=_ignore if arguments.json else _print_at_once,
    )
    if arguments.json:
        print(json.dumps(as_dict(result), indent=2))
    return 0 if result.same else 1


def _print_at_once(text: str) -> None:
    print(text, flush=True)


def _ignore(text: str) -> None:
    """Show nothing: the whole result follows as JSON."""


def check_at_least(least: int, flag: str, value: int) -> None:
    """Raise ConfigError for an option below its limit."""
    if value < least:
        raise ConfigError(
            f"{flag} must be at least {least}, got {value}", fix=f"give {flag} {least} or more"
        )


def program_from(name: str) -> Program:
    """Return the script or the recipe of that name; a file takes precedence."""
    if name in RECIPES and not Path(name).is_file():
        return recipe(name)
    return script(name)


def worlds_from(text: str) -> list[int]:
    """Return the world sizes of a list such as 1,2,4.

    >>> worlds_from("1,2,4")
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    positive = all(part.isdecimal() and int(part) > 0 for part in parts)
    if not positive or len(parts) < 2 or len(set(parts)) < len(parts):
        raise ConfigError(
            f"--worlds {text!r} is not a list of different world sizes",
            fix="give at least two, such as --worlds 1,2,4",
        )
    return [int(part) for part in parts]


def progress(*, quiet: bool) -> TextIO | None:
    """Return the stream for progress lines: standard error on a terminal, else none."""
    return None if quiet or not sys.stderr.isatty() else sys.stderr
