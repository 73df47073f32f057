"""`paceline sample`: generate text with a trained GPT."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config.arguments import REQUIRED, option, positional
from paceline.errors import ConfigError
from paceline.report.sanitize import harmless

if TYPE_CHECKING:
    from paceline.recipes.gpt_sample import Choice, TextGenerator


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """The same seed, prompt and checkpoint generate the same text."""

    run: str = positional(metavar="RUN")
    """Folder of a run of the gpt recipe."""
    prompt: str = option(REQUIRED, metavar="TEXT")
    """Text to continue, in quotes."""
    length: int = 200
    """Tokens to generate."""
    count: int = 1
    """Texts to generate."""
    temperature: float = option(0.8, metavar="T")
    """Sampling temperature; 0: always the most likely token."""
    top_k: int = option(50, metavar="K")
    """Sample from the K most likely tokens; 0: from all."""
    seed: int = 0
    """Random seed."""
    step: int | None = None
    """Checkpoint of this step (default: the newest intact one)."""
    json: bool = False
    """Print the texts and their checkpoint as JSON."""


def main(arguments: SampleArguments) -> int:
    """Generate the texts; return the exit code."""
    if not arguments.prompt:
        raise ConfigError("--prompt is empty", fix='give the text to continue: --prompt "The "')
    from paceline.recipes.gpt_sample import Choice, open_author

    author = open_author(arguments.run, arguments.step)
    for problem in author.passed_over:
        print(f"skipped: {problem}", file=sys.stderr)
    choice = Choice(arguments.temperature, arguments.top_k, arguments.seed)
    if arguments.count == 1 and not arguments.json:
        _stream(author, choice, arguments)
        return 0
    prompt = arguments.prompt
    texts = author.write_several(prompt, arguments.length, choice, arguments.count)
    if arguments.json:
        facts = {"where": author.where, "step": author.step, "prompt": prompt, "texts": texts}
        print(json.dumps(facts, indent=2))
        return 0
    for number, text in enumerate(texts, start=1):
        _show(f"--- {number} of {arguments.count}\n{prompt}{text}\n")
    return 0


def _stream(author: TextGenerator, choice: Choice, arguments: SampleArguments) -> None:
    """Print the text token by token."""
    _show(arguments.prompt)
    for piece in author.write(arguments.prompt, arguments.length, choice):
        _show(piece)
    _show("\n")


def _show(text: str) -> None:
    """Print text without control characters, except for line breaks and tabs."""
    parts = re.split(r"([\n\t])", text)
    clean = [part if part in "\n\t" else harmless(part) for part in parts]
    print("".join(clean), end="", flush=True)
