"""Samples that are texts: what one element is, and what must be made before rows can be cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.pool import PackTask, run_all
from paceline.data.pack.request import PackRequest, stat_of
from paceline.data.pack.stream import Stream
from paceline.data.pack.text_tasks import TextPart, tasks_of
from paceline.data.pack.tokens import CharacterTask, TokenTask, merge_characters
from paceline.data.vocabulary import (
    TOKENIZER,
    Bytes,
    Characters,
    load_tokenizer,
    train_tokenizer,
    width_for,
)
from paceline.errors import ConfigError, DataError
from paceline.rundir import write_whole

_Made = tuple[Stream, dict[str, Any]]


def prepare_text(request: PackRequest, files: Sequence[Path], shop: PackContext) -> Prepared:
    """Make the text numbers, and say what they mean."""
    how = _element(request)
    if not sum(stat_of(path)[0] for path in files):
        raise DataError(
            f"{', '.join(request.words)} holds no text", fix="name files that are not empty"
        )
    if how == "bytes":
        stream, about = _bytes(files, request.length)
    elif how == "characters":
        stream, about = _characters(files, request.length, shop)
    else:
        stream, about = _tokens(files, request, shop)
    if stream.samples < 1:
        there = stream.starts[-1]
        raise DataError(
            f"{', '.join(request.words)} has {there:,} {how}, fewer than one row of {request.length:,} and one more",
            fix=f"give --length {max(1, there - 1)} or less, or more text",
        )
    return Prepared(
        stream, about, {name: str(shop.spool / name) for name in about.get("files", ())}
    )


def _element(request: PackRequest) -> str:
    """Return what one element is to be, if the options agree."""
    wants_tokens = bool(request.tokenizer or request.train_tokenizer)
    how = request.text or ("tokens" if wants_tokens else "bytes")
    if request.tokenizer and request.train_tokenizer:
        raise ConfigError(
            "--tokenizer and --train-tokenizer are two tokenizers", fix="give one of them"
        )
    if wants_tokens != (how == "tokens"):
        raise ConfigError(
            f"--as {how} {'needs no' if wants_tokens else 'needs a'} tokenizer",
            fix="add --tokenizer FILE or --train-tokenizer VOCAB"
            if how == "tokens"
            else "leave the tokenizer out",
        )
    return how


def _bytes(files: Sequence[Path], length: int) -> _Made:
    counts = [stat_of(path)[0] for path in files]
    starts = list(itertools.accumulate(counts, initial=0))
    stream = Stream([str(path.absolute()) for path in files], counts, "<u1", starts, length)
    return stream, Bytes().about()


def _characters(files: Sequence[Path], length: int, shop: PackContext) -> _Made:
    tasks = tasks_of(files)
    found = (
        letters for _, letters in _run(CharacterTask(tasks), range(len(tasks)), shop, "reading")
    )
    letters = merge_characters(found)
    job = TokenTask(tasks, str(shop.spool), width_for(len(letters)), letters=letters)
    return _stream(job, length, shop), Characters(letters).about()


def _tokens(files: Sequence[Path], request: PackRequest, shop: PackContext) -> _Made:
    tasks = tasks_of(files)
    path = shop.spool / TOKENIZER
    if not path.exists():
        write_whole(path, _tokenizer(request, tasks, shop))
    tokens = load_tokenizer(path)
    end = tokens.end if request.length else -1
    job = TokenTask(tasks, str(shop.spool), width_for(tokens.size), tokenizer=str(path), end=end)
    return _stream(job, request.length, shop), tokens.about()


def _tokenizer(
    request: PackRequest, tasks: Sequence[Sequence[TextPart]], shop: PackContext
) -> bytes:
    """Return the file of the tokenizer that was given, or that is trained now."""
    if request.tokenizer:
        return load_tokenizer(Path(request.tokenizer)).content
    shop.progress("training a tokenizer", 0, 1)
    texts = (piece.text() for task in tasks for piece in task)
    return train_tokenizer(texts, request.train_tokenizer).encode()


def _stream(job: TokenTask, length: int, shop: PackContext) -> Stream:
    """Make the numbers of all tasks that were not done before."""
    done = job.done()
    left = [number for number in range(len(job.tasks)) if number not in done]
    done |= dict(_run(job, left, shop, "encoding"))
    ordered = [done[number] for number in range(len(job.tasks))]
    documents = [0] * (1 + job.tasks[-1][-1].document)
    for piece, count in zip(itertools.chain(*job.tasks), itertools.chain(*ordered), strict=True):
        documents[piece.document] += count
    parts = [str(job.part(number)) for number in range(len(job.tasks))]
    starts = list(itertools.accumulate(documents, initial=0))
    return Stream(parts, [sum(counts) for counts in ordered], job.dtype, starts, length)


def _run(job: PackTask, numbers: Sequence[int], shop: PackContext, what: str) -> Any:
    for count, found in enumerate(run_all(job, numbers, shop.workers), 1):
        shop.progress(f"{what} texts", count, len(numbers))
        yield found
