"""What a GPT reads: rows to train on, rows held out, and what their numbers stand for, which is kept with the run."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from paceline.data.shards.store import read_beside
from paceline.data.vocabulary import Bytes, Tokens, Vocabulary, vocabulary_of
from paceline.errors import ConfigError, DataError
from paceline.events import Event, RunStarted, Sink
from paceline.recipes.corpus import (
    make_vocabulary,
    text_from_shards,
    text_in_memory,
    vocabulary_of_datasets,
)
from paceline.recipes.gpt_config import GptConfig
from paceline.rundir import RunDir, write_whole, writing_to
from paceline.world.collectives import texts_of_all
from paceline.world.world import World


class Text(NamedTuple):
    """Rows, and what they are made of."""

    train: Any
    test: Any
    vocabulary: Vocabulary | None
    """None: nobody has said it. Then there can be no writing."""


def load_text(config: GptConfig, world: World) -> Text:
    """Return the text from where the config says. Every rank must call this."""
    if config.data == "shards":
        train, test = text_from_shards(config.data_folder, config)
        _check_length(train.source, config)
        return Text(train, test, vocabulary_of_datasets(train, test))
    vocabulary = _vocabulary(config, world)
    return Text(
        *text_in_memory(config.data_folder, config.context_length, vocabulary, config.windows),
        vocabulary,
    )


def _vocabulary(config: GptConfig, world: World) -> Vocabulary:
    """Return what the numbers are to stand for; one rank trains the tokenizer for all."""
    chosen = config.data_folder, config.level, config.tokenizer, config.train_tokenizer
    if not config.train_tokenizer or world.size == 1:
        return make_vocabulary(*chosen)
    mine = make_vocabulary(*chosen) if world.is_main else None
    told = texts_of_all(world, mine.content.decode() if isinstance(mine, Tokens) else "")[0]
    return Tokens.of(told.encode())


def _check_length(source: Any, config: GptConfig) -> None:
    shape = (
        source.columns[0].shape
        if hasattr(source, "columns") and hasattr(source, "vocabulary")
        else ()
    )
    if shape and shape[0] - 1 > config.context_length:
        raise ConfigError(
            f"rows of {shape[0] - 1} tokens are longer than context_length={config.context_length}",
            fix=f"set context_length={shape[0] - 1}",
        )


def vocabulary_saver(config: GptConfig, vocabulary: Vocabulary | None) -> Sink:
    """Return what writes the vocabulary into the run's folder, once that is ours and the training has begun."""

    def keep(event: Event) -> None:
        if isinstance(event, RunStarted) and vocabulary is not None:
            goes_on = event.from_step > 0 and config.resume != "changed"
            _keep(RunDir.of(config), vocabulary, goes_on=goes_on)

    return keep


def _keep(folder: RunDir, vocabulary: Vocabulary, *, goes_on: bool) -> None:
    content = json.dumps(vocabulary.about(), indent=1).encode()
    with writing_to(folder.root):
        if goes_on and folder.vocabulary.exists() and folder.vocabulary.read_bytes() != content:
            raise ConfigError(
                f"{folder.root} was trained on text of another vocabulary",
                fix="give the text and tokenizer that it had, or this run another name=",
            )
        for name, part in vocabulary.files.items():
            write_whole(folder.root / name, part)
        write_whole(folder.vocabulary, content)


def load_vocabulary(folder: RunDir, config: GptConfig) -> Vocabulary:
    """Return what the numbers of a run stand for."""
    path = folder.vocabulary
    try:
        about = json.loads(path.read_bytes())
    except FileNotFoundError:
        if config.level == "bytes" and config.vocab_size >= Bytes.size:
            return Bytes()  # earlier runs knew nothing else
        about = {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read {path}: {error}", fix="train again: it says what the numbers stand for"
        ) from error
    where = str(folder.root)
    found = (
        vocabulary_of(about, lambda name: read_beside(folder.root, name), where)
        if isinstance(about, dict)
        else None
    )
    if found is None:
        raise DataError(
            f"{where} does not say what its numbers stand for",
            fix="train on text, or on shards that `paceline data pack` has made of text",
        )
    if found.size > config.vocab_size:
        raise ConfigError(
            f"{path} has {found.size} tokens, the model {config.vocab_size}",
            fix="bring back the file that was written with this run",
        )
    return found
