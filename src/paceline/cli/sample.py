"""Let a GPT that was trained here go on from a text: sample RUN --prompt TEXT."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import ConfigError, did_you_mean
from paceline.terminal import plain

HELP = "let a trained GPT write: what comes after a prompt"

_OPTIONS = (
    "--prompt",
    "--length",
    "--count",
    "--temperature",
    "--top-k",
    "--seed",
    "--step",
    "--json",
)
N = TypeVar("N", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="the folder of a run of the gpt recipe"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument(
        "--length", default="200", metavar="N", help="tokens to write (default: %(default)s)"
    )
    parser.add_argument(
        "--count", default="1", metavar="N", help="texts to write (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        default="0.8",
        metavar="T",
        help="0: the likeliest token, always (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        default="50",
        metavar="K",
        help="only so many of the likeliest; 0: all (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        default="0",
        metavar="N",
        help="the same seed writes the same (default: %(default)s)",
    )
    parser.add_argument(
        "--step", metavar="N", help="the checkpoint of this step; without it, the newest good one"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the text and where it comes from as JSON"
    )


def main(known: argparse.Namespace) -> int:
    """Write."""
    _check_words(known)
    length, count, seed, top_k = (
        _number(int, f"--{name}", known) for name in ("length", "count", "seed", "top-k")
    )
    temperature = _number(float, "--temperature", known)
    step = None if known.step is None else _number(int, "--step", known)
    from paceline.recipes.gpt_sample import Sampling, load_generator

    choice = Sampling(temperature, top_k, seed)
    author = load_generator(known.run, step)
    for problem in author.passed_over:
        print(f"passed over: {problem}", file=sys.stderr)
    if known.json:
        texts = author.generate_several(known.prompt, length, choice, count)
        facts = {"where": author.where, "step": author.step, "prompt": known.prompt, "texts": texts}
        print(json.dumps(facts, indent=2))
    elif count == 1:
        for piece in itertools.chain(
            [known.prompt], author.generate(known.prompt, length, choice), ["\n"]
        ):
            _show(piece)
    else:
        for number, text in enumerate(
            author.generate_several(known.prompt, length, choice, count), start=1
        ):
            _show(f"--- {number} of {count}\n{known.prompt}{text}\n")
    return 0


def _check_words(known: argparse.Namespace) -> None:
    for word in known.arguments:
        if word.startswith("-"):
            raise ConfigError(f"there is no option {word}", fix=did_you_mean(word, _OPTIONS))
        raise ConfigError(f"unexpected word {word!r}", fix="put the prompt in quotes")
    if not known.run:
        raise ConfigError(
            "which run?", fix="name its folder: paceline sample runs/gpt --prompt TEXT"
        )
    if not known.prompt:
        raise ConfigError("what does the text begin with?", fix='say it: --prompt "The "')


def _number(kind: Callable[[str], N], flag: str, known: argparse.Namespace) -> N:
    text = getattr(known, flag.removeprefix("--").replace("-", "_"))
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} {text!r} is not a number", fix=f"give one, as in {flag} 1"
        ) from error


def _show(text: str) -> None:
    """Print text that orders a terminal nothing but to begin a line, or to go on to the next column."""
    print(
        "".join(part if part in "\n\t" else plain(part) for part in re.split(r"([\n\t])", text)),
        end="",
        flush=True,
    )
