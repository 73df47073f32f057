"""How a trained GPT writes: the model of a checkpoint, and one token after the other.

Every token is found by computing the last `length` tokens anew. There is no cache of keys and values: a window that
moves on gives every token another place, and with it other keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.catalog import Catalog, from_newest
from paceline.checkpoint.manifest import Manifest, unreadable
from paceline.checkpoint.restore import read_tensors
from paceline.checkpoint.storage import Storage, manifest_of
from paceline.checkpoint.whereabouts import find_catalog
from paceline.config.values import field_types, with_settings
from paceline.data.vocabulary import Tokens, Vocabulary
from paceline.errors import ConfigError, TrainingError
from paceline.recipes.gpt_config import GptConfig, design_of
from paceline.recipes.gpt_model import GPT
from paceline.recipes.gpt_text import kept_vocabulary
from paceline.rundir import RunDir
from paceline.world.randomness import mix

_MODEL = "model."
_OURS = {"size", "length", "tokens", "positions"}  # settings that every run of the recipe has
_TORN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Choice:
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
                f"a temperature of {self.temperature} is none", fix="give 0 (the likeliest token) or more, such as 0.8"
            )
        if self.top_k < 0:
            raise ConfigError(f"top-k {self.top_k} leaves no token", fix="give 1 or more, or 0 for all")


@dataclass(frozen=True)
class Author:
    """A trained GPT that can write."""

    model: GPT
    vocabulary: Vocabulary
    step: int
    where: str
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, which were not taken."""

    def write(self, prompt: str, length: int, choice: Choice) -> Iterator[str]:
        """Yield what comes after the prompt, in pieces of whole characters; the same for the same seed."""
        if length < 1:
            raise ConfigError(f"a length of {length} tokens is no text", fix="give 1 or more")
        numbers = self._numbers(prompt)
        drawn = draw(self.model, numbers, self.vocabulary.size, choice)
        return spelled(self.vocabulary, numbers, (next(drawn) for _ in range(length)))

    def _numbers(self, prompt: str) -> list[int]:
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ConfigError("the prompt is not text in UTF-8", fix="give it in the encoding of your terminal")
        numbers: list[int] = self.vocabulary.encode(prompt).tolist()
        if isinstance(self.vocabulary, Tokens) and (lost := self.vocabulary.lost(prompt)):
            raise ConfigError(f"the tokenizer of the run has no token for {lost!r}", fix="leave that character out")
        if not numbers:
            raise ConfigError("there is nothing to go on from", fix='give a few words: --prompt "The "')
        return numbers


def open_author(run: str, step: int | None = None) -> Author:
    """Return the GPT of a run's newest good checkpoint, or of the one of a step."""
    catalog = find_catalog(run)
    folder = RunDir(Path(run))
    if not folder.config.is_file():
        raise ConfigError(f"{run} is not the folder of a run", fix="name the folder that holds its config.toml")
    if step is not None:
        catalog = catalog.narrowed(step)
    return _author(catalog, folder)


def _author(catalog: Catalog, folder: RunDir) -> Author:
    (manifest, config, model), passed_over = from_newest(catalog, lambda step: _load(catalog.storage, step))
    vocabulary = kept_vocabulary(folder, config)
    if vocabulary.size > config.tokens:
        raise ConfigError(
            f"{folder.vocabulary} has {vocabulary.size} tokens, the model {config.tokens}",
            fix="bring back the file that was written with this run",
        )
    return Author(model, vocabulary, manifest.step, catalog.storage.where(manifest.step), passed_over)


def _load(storage: Storage, step: int) -> tuple[Manifest, GptConfig, GPT]:
    """Build the model of a checkpoint as its settings say; only bytes that were summed become weights."""
    manifest = manifest_of(storage, step)
    config = _settings(manifest, storage.where(step))
    model = GPT(design_of(config))
    missing = dict(model.state_dict())
    for name, value in read_tensors(storage, manifest):
        own = missing.pop(name.removeprefix(_MODEL), None) if name.startswith(_MODEL) else None
        if own is not None and own.shape != value.shape:
            raise unreadable(storage.where(step), f"{name} is {list(value.shape)} instead of {list(own.shape)}")
        if own is not None:
            own.copy_(value)
    if missing:
        raise unreadable(storage.where(step), f"it lacks {', '.join(sorted(missing)[:3])}")
    return manifest, config, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _settings(manifest: Manifest, where: str) -> GptConfig:
    """Return the settings of a run of the recipe; a script's own, and a later version's, are left out."""
    if not manifest.config.keys() >= _OURS:
        raise ConfigError(f"{where} is not of the gpt recipe", fix="name a run that `paceline train gpt` has made")
    known = field_types(GptConfig)
    return with_settings(GptConfig(), {name: value for name, value in manifest.config.items() if name in known})


@torch.inference_mode()
def draw(model: GPT, numbers: Sequence[int], known: int, choice: Choice) -> Iterator[int]:
    """Yield one token after the other, without end, of those that are known."""
    generator = torch.Generator().manual_seed(mix(choice.seed) & 0x7FFF_FFFF_FFFF_FFFF)
    window = list(numbers)
    device = model.embedding.weight.device
    while True:
        window = window[-model.design.length :]
        scores = model(torch.tensor([window], device=device))[0, -1, :known]
        window.append(_chosen(scores.double().cpu(), choice, generator))
        yield window[-1]


def _chosen(scores: Tensor, choice: Choice, generator: torch.Generator) -> int:
    """Return the likeliest token, or one of the likeliest by chance."""
    if not scores.isfinite().all():
        raise TrainingError("the model gives scores that are no numbers", fix="take an earlier checkpoint with --step")
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
