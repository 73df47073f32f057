"""`paceline completion`: print the script that makes a shell complete commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.config.arguments import positional


@dataclass(frozen=True, kw_only=True)
class CompletionArguments:
    """It completes verbs, options, settings, and the names of recipes, runs and scripts. In ~/.bashrc or ~/.zshrc, write `source <(paceline completion bash)`, or zsh; for fish, type `paceline completion fish > ~/.config/fish/completions/paceline.fish`."""

    shell: Literal["bash", "zsh", "fish"] = positional(metavar="SHELL")
    """bash, zsh or fish."""


def main(arguments: CompletionArguments) -> int:
    """Print the script."""
    script = Path(__file__).with_name(f"completion.{arguments.shell}")
    print(script.read_text(encoding="utf-8"), end="")
    return 0
