"""`paceline sample`: generate text with a trained GPT."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.checkpoint.find import located
from paceline.config.arguments import REQUIRED, option, positional
from paceline.errors import ConfigError
from paceline.terminal import plain

if TYPE_CHECKING:
    from paceline.recipes.gpt_sample import Sampling, TextGenerator


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """The same seed, prompt and checkpoint generate the same text."""

    run: str = positional(metavar="RUN")
    """Name or folder of a run of the gpt recipe."""
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
    from paceline.recipes.gpt_sample import Sampling, load_generator

    generator = load_generator(located(arguments.run), arguments.step)
    for problem in generator.passed_over:
        print(f"skipped: {problem}", file=sys.stderr)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.seed)
    if arguments.count == 1 and not arguments.json:
        _stream(generator, sampling, arguments)
        return 0
    prompt = arguments.prompt
    texts = generator.generate_several(prompt, arguments.length, sampling, arguments.count)
    if arguments.json:
        facts = {"where": generator.where, "step": generator.step, "prompt": prompt, "texts": texts}
        print(json.dumps(facts, indent=2))
        return 0
    for number, text in enumerate(texts, start=1):
        _show(f"--- {number} of {arguments.count}\n{prompt}{text}\n")
    return 0


def _stream(generator: TextGenerator, sampling: Sampling, arguments: SampleArguments) -> None:
    """Print the text token by token."""
    # Created before anything is printed, because it checks the prompt and the length.
    pieces = generator.generate(arguments.prompt, arguments.length, sampling)
    _show(arguments.prompt)
    for piece in pieces:
        _show(piece)
    _show("\n")


def _show(text: str) -> None:
    """Print text without control characters, except for line breaks and tabs."""
    parts = re.split(r"([\n\t])", text)
    clean = [part if part in "\n\t" else plain(part) for part in parts]
    print("".join(clean), end="", flush=True)
