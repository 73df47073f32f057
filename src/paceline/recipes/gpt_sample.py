"""How a trained GPT writes: the model of a checkpoint, and one token after the other.

Keys and values are remembered, so a token costs one place. A text longer than the model looks back moves its window on by
a quarter at a time, which is then read anew: its tokens have other places, and with them other keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.find import find_catalog
from paceline.data.vocabulary import Tokens, Vocabulary
from paceline.errors import ConfigError, TrainingError
from paceline.recipes.gpt_from_run import load_newest
from paceline.recipes.gpt_kv_cache import KVCache
from paceline.recipes.gpt_model import GPT
from paceline.recipes.gpt_text import load_vocabulary
from paceline.rundir import RunDir
from paceline.world.randomness import mix

_TORN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """Below 1 likely tokens become likelier; 0: the likeliest, always."""
    top_k: int = 50
    """Only so many of the likeliest are in question; 0: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that choose nothing."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"a temperature of {self.temperature} is none",
                fix="give 0 (the likeliest token) or more, such as 0.8",
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top-k {self.top_k} leaves no token", fix="give 1 or more, or 0 for all"
            )


@dataclass(frozen=True)
class TextGenerator:
    """A trained GPT that can write."""

    model: GPT
    vocabulary: Vocabulary
    step: int
    where: str
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which were not taken."""

    def write(self, prompt: str, length: int, choice: Sampling) -> Iterator[str]:
        """Yield what comes after the prompt, in pieces of whole characters; the same for the same seed."""
        numbers = self._numbers(prompt)
        drawn = itertools.islice(self._drawn(numbers, length, choice, 1), length)
        return spelled(self.vocabulary, numbers, (row[0] for row in drawn))

    def write_several(self, prompt: str, length: int, choice: Sampling, count: int) -> list[str]:
        """Return several texts that come after the prompt, written side by side."""
        if count < 1:
            raise ConfigError(f"{count} texts are none", fix="give 1 or more")
        numbers = self._numbers(prompt)
        rows = list(itertools.islice(self._drawn(numbers, length, choice, count), length))
        return [
            "".join(spelled(self.vocabulary, numbers, iter(text)))
            for text in zip(*rows, strict=True)
        ]

    def _drawn(
        self, numbers: Sequence[int], length: int, choice: Sampling, count: int
    ) -> Iterator[list[int]]:
        if length < 1:
            raise ConfigError(f"a length of {length} tokens is no text", fix="give 1 or more")
        return draw(self.model, numbers, self.vocabulary.size, choice, count)

    def _numbers(self, prompt: str) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError(
                "the prompt is not text in UTF-8", fix="give it in the encoding of your terminal"
            )
        numbers: list[int] = self.vocabulary.encode(prompt).tolist()
        if isinstance(self.vocabulary, Tokens) and (lost := self.vocabulary.lost(prompt)):
            raise ConfigError(
                f"the tokenizer of the run has no token for {lost!r}",
                fix="leave that character out",
            )
        if not numbers:
            raise ConfigError(
                "there is nothing to go on from", fix='give a few words: --prompt "The "'
            )
        return numbers


def load_generator(run: str, step: int | None = None) -> TextGenerator:
    """Return the GPT of a run's newest good checkpoint, or of the one of a step."""
    catalog = find_catalog(run)
    folder = RunDir(Path(run))
    if not folder.config.is_file():
        raise ConfigError(
            f"{run} is not the folder of a run", fix="name the folder that holds its config.toml"
        )
    found = load_newest(catalog if step is None else catalog.narrowed(step))
    model = found.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return TextGenerator(
        model, load_vocabulary(folder, found.config), found.step, found.where, found.passed_over
    )


def window_begin(count: int, length: int) -> int:
    """Return the first token that is looked at after so many: the model sees at least three quarters of its length.

    >>> [window_begin(count, 8) for count in (1, 8, 9, 10, 11, 20)]
    [0, 0, 2, 2, 4, 12]
    """
    stride = max(1, length // 4)
    return max(0, -(-(count - length) // stride) * stride)


@torch.inference_mode()
def draw(
    model: GPT, numbers: Sequence[int], known: int, choice: Sampling, count: int = 1
) -> Iterator[list[int]]:
    """Yield the next token of each of several texts, without end, of those that are known; all begin with the same numbers."""
    generators = [_generator(choice.seed, row) for row in range(count)]
    memory, device = KVCache(model, count), model.embedding.weight.device
    texts = [list(numbers) for _ in range(count)]
    fresh = window_begin(len(numbers), model.design.context_length)
    while True:
        tokens = torch.tensor([text[fresh:] for text in texts], device=device)
        scores = model.read_on(tokens, memory)[:, :known].double().cpu()
        chosen = [
            _chosen(row, choice, generator)
            for row, generator in zip(scores, generators, strict=True)
        ]
        yield chosen
        for text, number in zip(texts, chosen, strict=True):
            text.append(number)
        fresh = len(texts[0]) - 1
        if memory.seen == model.design.context_length:
            memory.forget()
            fresh = window_begin(len(texts[0]), model.design.context_length)


def _generator(seed: int, row: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, *[row] * (row > 0)) & 0x7FFF_FFFF_FFFF_FFFF)


def _chosen(scores: Tensor, choice: Sampling, generator: torch.Generator) -> int:
    """Return the likeliest token, or one of the likeliest by chance."""
    if not scores.isfinite().all():
        raise TrainingError(
            "the model gives scores that are no numbers",
            fix="take an earlier checkpoint with --step",
        )
    if choice.temperature == 0:
        return int(scores.argmax())
    best, places = scores.topk(min(choice.top_k or len(scores), len(scores)))
    chances = torch.softmax((best - best[0]) / choice.temperature, dim=0)
    return int(places[torch.multinomial(chances, 1, generator=generator)])


def spelled(vocabulary: Vocabulary, prompt: Sequence[int], drawn: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens as soon as its characters are whole; a token may be half a character, or a space and a word."""
    numbers = list(prompt)
    shown = len(vocabulary.decode(numbers))
    for number in drawn:
        numbers.append(number)
        text = vocabulary.decode(numbers)
        if len(text) > shown and not text.endswith(_TORN):
            yield text[shown:]
            shown = len(text)
    yield vocabulary.decode(numbers)[shown:]
