"""Run a script (or a recipe) at several world sizes and say whether weights, optimizer state and losses are the same bits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TextIO

from paceline.cli.train import recipe
from paceline.errors import ConfigError
from paceline.launch.spec import Program, script
from paceline.recipes import RECIPES
from paceline.verify.compare_worlds import verify
from paceline.verify.verdict import VerifyResult, as_dict, describe

HELP = "the same bits at every world size? else the first step and tensor that differ, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument("script", help="a script, or the name of a recipe")
    parser.add_argument(
        "--worlds",
        default="1,2,3,4",
        help="numbers of ranks to compare; the first is the reference",
    )
    parser.add_argument("--steps", type=int, default=8, help="steps to compare")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def main(known: argparse.Namespace) -> int:
    """Compare, and exit with 0 for the same bits, 1 for a difference."""
    if known.steps < 1:
        raise ConfigError(
            f"--steps {known.steps} compares nothing", fix="compare at least one step: --steps 1"
        )
    verdict: VerifyResult = verify(
        target(known.script),
        worlds_from(known.worlds),
        known.steps,
        tuple(known.arguments),
        progress(quiet=known.json),
    )
    print(json.dumps(as_dict(verdict), indent=2) if known.json else describe(verdict))
    return 0 if verdict.same else 1


def target(word: str) -> Program:
    """Return the script or recipe that a word names; a file wins."""
    return recipe(word) if word in RECIPES and not Path(word).is_file() else script(word)


def worlds_from(text: str) -> list[int]:
    """Return the world sizes of a list such as 1,2,4.

    >>> worlds_from("1,2,4")
    [1, 2, 4]
    """
    words = [word.strip() for word in text.split(",")]
    if (
        not all(word.isdecimal() and int(word) > 0 for word in words)
        or len(words) < 2
        or len(set(words)) < len(words)
    ):
        raise ConfigError(
            f"--worlds {text!r} is not a list of world sizes",
            fix="give at least two, such as --worlds 1,2,4",
        )
    return [int(word) for word in words]


def progress(*, quiet: bool) -> TextIO | None:
    """Return what shows that a long comparison is moving."""
    return None if quiet or not sys.stderr.isatty() else sys.stderr
