"""Generate text with a trained GPT, token by token, by temperature and top-k sampling.

A KV cache makes a token cost one position. When a text outgrows the context length, the window
moves on by a quarter of it, and the cache is filled anew: its tokens have other positions then,
and hence other keys.
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
from paceline.recipes.gpt_model import GPT
from paceline.recipes.gpt_text import load_vocabulary
from paceline.rundir import RunDir
from paceline.world.randomness import mix

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 0.8
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 50
    """Sample from this many most likely tokens; 0: from all."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature must be >= 0, got {self.temperature}",
                fix="use 0 (the most likely token) or more, such as 0.8",
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top-k must be at least 0, got {self.top_k}", fix="use 1 or more, or 0 for all"
            )


@dataclass(frozen=True)
class TextGenerator:
    """A trained GPT with its vocabulary."""

    model: GPT
    vocabulary: Vocabulary
    step: int
    where: str
    passed_over: tuple[str, ...] = ()
    """Problems of newer checkpoints, which were skipped."""

    def generate(self, prompt: str, length: int, sampling: Sampling) -> Iterator[str]:
        """Yield the continuation of a prompt as whole characters.

        A seed always gives the same text.
        """
        numbers = self._encode(prompt)
        drawn = itertools.islice(self._draw(numbers, length, sampling, 1), length)
        return decode_stream(self.vocabulary, numbers, (row[0] for row in drawn))

    def generate_several(
        self, prompt: str, length: int, sampling: Sampling, count: int
    ) -> list[str]:
        """Return several continuations of a prompt, generated as one batch."""
        if count < 1:
            raise ConfigError(f"--count must be at least 1, got {count}", fix="use 1 or more")
        numbers = self._encode(prompt)
        rows = list(itertools.islice(self._draw(numbers, length, sampling, count), length))
        texts = (
            decode_stream(self.vocabulary, numbers, iter(tokens))
            for tokens in zip(*rows, strict=True)
        )
        return list(map("".join, texts))

    def _draw(
        self, numbers: Sequence[int], length: int, sampling: Sampling, count: int
    ) -> Iterator[list[int]]:
        if length < 1:
            raise ConfigError(f"--length must be at least 1, got {length}", fix="use 1 or more")
        return draw(self.model, numbers, self.vocabulary.size, sampling, count)

    def _encode(self, prompt: str) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError(
                "the prompt is not UTF-8 text", fix="type it in the encoding of your terminal"
            )
        numbers: list[int] = self.vocabulary.encode(prompt).tolist()
        if isinstance(self.vocabulary, Tokens) and (
            lost := self.vocabulary.first_unencodable(prompt)
        ):
            raise ConfigError(
                f"the tokenizer of the run has no token for {lost!r}", fix="remove that character"
            )
        if not numbers:
            raise ConfigError("the prompt is empty", fix='give a few words: --prompt "The "')
        return numbers


def load_generator(run: str, step: int | None = None) -> TextGenerator:
    """Return the GPT of a run's newest intact checkpoint, or of one step."""
    catalog = find_catalog(run)
    folder = RunDir(Path(run))
    if not folder.config.is_file():
        raise ConfigError(
            f"{run} is not a run folder", fix="name the folder that contains config.toml"
        )
    trained = load_newest(catalog if step is None else catalog.narrowed(step))
    model = trained.model.to("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = load_vocabulary(folder, trained.config)
    return TextGenerator(model, vocabulary, trained.step, trained.where, trained.passed_over)


def window_begin(count: int, length: int) -> int:
    """Return the first of `count` tokens in the window, which moves by a quarter of its length.

    >>> [window_begin(count, 8) for count in (1, 8, 9, 10, 11, 20)]
    [0, 0, 2, 2, 4, 12]
    """
    stride = max(1, length // 4)
    return max(0, -(-(count - length) // stride) * stride)


@torch.inference_mode()
def draw(
    model: GPT, numbers: Sequence[int], known: int, sampling: Sampling, count: int = 1
) -> Iterator[list[int]]:
    """Yield the next token of each of `count` texts, without end.

    Only the first `known` tokens are sampled.
    """
    generators = [_generator(sampling.seed, row) for row in range(count)]
    cache, device = model.new_cache(count), model.embedding.weight.device
    texts = [list(numbers) for _ in range(count)]
    begin = window_begin(len(numbers), model.design.context_length)
    while True:
        tokens = torch.tensor([text[begin:] for text in texts], device=device)
        logits = model.next_logits(tokens, cache)[:, :known].double().cpu()
        sampled = []
        for row, generator in zip(logits, generators, strict=True):
            sampled.append(_sample(row, sampling, generator))
        yield sampled
        for text, number in zip(texts, sampled, strict=True):
            text.append(number)
        begin = len(texts[0]) - 1
        if cache.positions == model.design.context_length:
            cache.clear()
            begin = window_begin(len(texts[0]), model.design.context_length)


def _generator(seed: int, row: int) -> torch.Generator:
    return torch.Generator().manual_seed(mix(seed, *[row] * (row > 0)) & 0x7FFF_FFFF_FFFF_FFFF)


def _sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise TrainingError(
            "the logits of the model are not finite", fix="use an earlier checkpoint: --step N"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    probabilities = torch.softmax((best - best[0]) / sampling.temperature, dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def decode_stream(
    vocabulary: Vocabulary, prompt: Sequence[int], drawn: Iterator[int]
) -> Iterator[str]:
    """Yield the text of tokens once its characters are complete.

    A token may end inside a character.
    """
    numbers = list(prompt)
    shown = len(vocabulary.decode(numbers))
    for number in drawn:
        numbers.append(number)
        text = vocabulary.decode(numbers)
        if len(text) > shown and not text.endswith(_INCOMPLETE):
            yield text[shown:]
            shown = len(text)
    yield vocabulary.decode(numbers)[shown:]
