"""Training and held-out text of a GPT, and its vocabulary, which is stored in the run folder."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from paceline.data.shards.store import read_dataset_file
from paceline.data.vocabulary import Bytes, Tokens, Vocabulary, vocabulary_of
from paceline.errors import ConfigError, DataError
from paceline.events import Event, RunStarted
from paceline.recipes.corpus import (
    make_vocabulary,
    text_from_shards,
    text_in_memory,
    vocabulary_of_datasets,
)
from paceline.recipes.gpt_config import GptConfig
from paceline.rundir import RunDir, write_whole, writing_to
from paceline.safe_open import read_bytes, read_json
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_LARGEST = 1 << 28  # bytes of a vocabulary


class Text(NamedTuple):
    """Training and held-out sequences, with their vocabulary."""

    train: Any
    test: Any
    vocabulary: Vocabulary | None
    """None if the dataset does not store it; such a GPT cannot generate text."""


def load_text(config: GptConfig, world: World) -> Text:
    """Return the text that the settings name. Every rank must call this."""
    if config.data == "shards":
        train, test = text_from_shards(config.data_folder, config)
        _check_length(train.source, config)
        return Text(train, test, vocabulary_of_datasets(train, test))
    vocabulary = _vocabulary(config, world)
    length = config.context_length
    train, test = text_in_memory(config.data_folder, length, vocabulary, config.windows)
    return Text(train, test, vocabulary)


def _vocabulary(config: GptConfig, world: World) -> Vocabulary:
    """Return the vocabulary; rank 0 trains a tokenizer for all ranks."""
    settings = config.data_folder, config.level, config.tokenizer, config.train_tokenizer
    if not config.train_tokenizer or world.size == 1:
        return make_vocabulary(*settings)
    trained = make_vocabulary(*settings) if world.is_main else None
    content = trained.content.decode() if isinstance(trained, Tokens) else ""
    return Tokens.of(all_gather_texts(world, content)[0].encode())


def _check_length(source: Any, config: GptConfig) -> None:
    if not (hasattr(source, "columns") and hasattr(source, "vocabulary")):
        return
    shape = source.columns[0].shape
    if shape and shape[0] - 1 > config.context_length:
        raise ConfigError(
            f"sequences of {shape[0] - 1} tokens exceed context_length={config.context_length}",
            fix=f"set context_length={shape[0] - 1}",
        )


class VocabularySaver:
    """An event sink that writes the vocabulary to the run folder when the training starts."""

    def __init__(self, config: GptConfig) -> None:
        self._config = config
        self.vocabulary: Vocabulary | None = None

    def __call__(self, event: Event) -> None:
        """Write the vocabulary, if this event is the start."""
        if isinstance(event, RunStarted) and self.vocabulary is not None:
            resumed = event.from_step > 0 and self._config.resume != "changed"
            _write_vocabulary(RunDir.of(self._config), self.vocabulary, resumed=resumed)


def _write_vocabulary(folder: RunDir, vocabulary: Vocabulary, *, resumed: bool) -> None:
    content = json.dumps(vocabulary.about(), indent=1).encode()
    with writing_to(folder.root):
        if (
            resumed
            and folder.vocabulary.exists()
            and read_bytes(folder.vocabulary, _LARGEST) != content
        ):
            raise ConfigError(
                f"{folder.root} was trained with another vocabulary",
                fix="use the same text and tokenizer, or another name=",
            )
        for name, part in vocabulary.files.items():
            write_whole(folder.root / name, part)
        write_whole(folder.vocabulary, content)


def load_vocabulary(folder: RunDir, config: GptConfig) -> Vocabulary:
    """Return the vocabulary that a run was trained with."""
    path = folder.vocabulary
    try:
        about = read_json(path, _LARGEST)
    except FileNotFoundError:
        if config.level == "bytes" and config.vocab_size >= Bytes.size:
            return Bytes()  # older runs stored no vocabulary
        about = {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}",
            fix="restore the vocabulary file of this run, or train again",
        ) from error
    where = str(folder.root)
    vocabulary = None
    if isinstance(about, dict):
        vocabulary = vocabulary_of(about, lambda name: read_dataset_file(folder.root, name), where)
    if vocabulary is None:
        raise DataError(
            f"{where} stores no vocabulary",
            fix="train on text, or on shards of text made by `paceline data pack`",
        )
    if vocabulary.size > config.vocab_size:
        raise ConfigError(
            f"{path} has {vocabulary.size} tokens, the model {config.vocab_size}",
            fix="restore the file that was written with this run",
        )
    return vocabulary
