"""`paceline train`: train a built-in recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cli.run import LaunchArguments, start
from paceline.config.arguments import flag, positional, rest
from paceline.errors import ConfigError, did_you_mean
from paceline.launch.spec import Program, module
from paceline.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class TrainArguments(LaunchArguments):
    """Run the same command again to resume from the newest intact checkpoint."""

    recipe: str = positional("", metavar="RECIPE", needed=True)
    """Recipe to train: toy (a linear model on 2,048 samples), mnist (a convolutional network on handwritten digits) or gpt (a small GPT on text)."""
    settings: tuple[str, ...] = rest("SETTING=VALUE")
    """Settings of the recipe, as key=value or as flags; --help after the recipe lists them."""
    help: bool = flag("-h", "--help")
    """Show the settings of the recipe; without a recipe, show this help."""


def main(arguments: TrainArguments) -> int:
    """Train the recipe; return the exit code."""
    if arguments.help and not arguments.recipe:
        from paceline.cli.commands import COMMANDS
        from paceline.config.help import verb_help

        print(verb_help(TrainArguments, "paceline train", COMMANDS["train"].help), flush=True)
        return 0
    program = recipe(arguments.recipe)
    if arguments.help:
        return start(program, replace(arguments, ranks="1"), ["--help"])
    return start(program, arguments, arguments.settings)


def recipe(name: str) -> Program:
    """Return the program of a recipe; raise ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(
            f"there is no recipe {name!r}" if name else "RECIPE is missing",
            fix=did_you_mean(name, RECIPES),
        )
    return module(name, f"paceline.recipes.{name}")
