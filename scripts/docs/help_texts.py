"""The text of every `--help`: `make reference` stores them in one file, and tests/cli/test_help.py compares the program with it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from unittest.mock import patch

from paceline.cli.commands import COMMANDS
from paceline.cli.main import run_verb
from paceline.config import RunConfig
from paceline.config.help import settings_help


def help_texts() -> str:
    """Return the help of the program, of each verb and action, and of a script's settings."""
    with patch.dict(os.environ, COLUMNS="100"):
        texts = {f"paceline {' '.join(words)}": _printed(words) for words in command_lines()}
        texts["python train.py --help"] = f"{settings_help(RunConfig, 'train.py')}\n"
    return "\n".join(f"$ {line}\n{text}" for line, text in texts.items())


def command_lines() -> Iterator[list[str]]:
    """Yield every command line that prints a help."""
    yield ["--help"]
    for name, verb in COMMANDS.items():
        yield [name, "--help"]
        yield from ([name, action, "--help"] for action in verb.actions)


def _printed(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_verb(words)
    return said.getvalue()
