"""Train a built-in recipe right now; words after it are its settings (key=value, or flags)."""

from __future__ import annotations

import argparse

from paceline.cli.run import add_launch_arguments, start
from paceline.errors import ConfigError, did_you_mean
from paceline.launch.spec import Program, module
from paceline.recipes import RECIPES

HELP = "train a built-in recipe right now: " + ", ".join(RECIPES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default="",
        help="; ".join(f"{name}: {what}" for name, what in RECIPES.items()),
    )
    add_launch_arguments(parser)
    parser.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="show the recipe's settings, or this text without a recipe",
    )
    parser.set_defaults(show_help=parser.print_help)


def main(known: argparse.Namespace) -> int:
    """Start the recipe."""
    if known.help and not known.recipe:
        known.show_help()
        return 0
    if known.help:
        known.ranks, known.arguments = "1", ["--help"]
    return start(recipe(known.recipe), known)


def recipe(name: str) -> Program:
    """Return the target for a recipe, or say which there are."""
    if name not in RECIPES:
        raise ConfigError(
            f"there is no recipe {name!r}" if name else "which recipe?",
            fix=did_you_mean(name, RECIPES),
        )
    return module(name, f"paceline.recipes.{name}")
