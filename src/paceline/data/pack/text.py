"""Pack text as bytes, characters or tokens: build the vocabulary, then encode all files."""

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


def prepare_text(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Encode the text; the index stores its vocabulary."""
    unit = _unit(request)
    if not sum(stat_of(path)[0] for path in files):
        raise DataError(
            f"{', '.join(request.inputs)} contains no text", fix="name files that are not empty"
        )
    if unit == "bytes":
        stream, about = _bytes(files, request.length)
    elif unit == "characters":
        stream, about = _characters(files, request.length, context)
    else:
        stream, about = _tokens(files, request, context)
    if stream.samples < 1:
        count = stream.starts[-1]
        raise DataError(
            f"{', '.join(request.inputs)} has {count:,} {unit}, one row needs {request.length + 1:,}",
            fix=f"use --length {max(1, count - 1)} or less, or add text",
        )
    files_beside = {name: str(context.spool / name) for name in about.get("files", ())}
    return Prepared(stream, about, files_beside)


def _unit(request: PackRequest) -> str:
    """Return bytes, characters or tokens; raise if the options contradict each other."""
    wants_tokens = bool(request.tokenizer or request.train_tokenizer)
    unit = request.text or ("tokens" if wants_tokens else "bytes")
    if request.tokenizer and request.train_tokenizer:
        raise ConfigError(
            "--tokenizer and --train-tokenizer are two tokenizers", fix="use one of them"
        )
    if wants_tokens != (unit == "tokens"):
        if unit == "tokens":
            raise ConfigError(
                "--as tokens needs a tokenizer",
                fix="add --tokenizer FILE or --train-tokenizer VOCAB",
            )
        raise ConfigError(
            f"a tokenizer does not apply to --as {unit}", fix="remove the tokenizer, or --as"
        )
    return unit


def _bytes(files: Sequence[Path], length: int) -> _Made:
    counts = [stat_of(path)[0] for path in files]
    starts = list(itertools.accumulate(counts, initial=0))
    stream = Stream([str(path.absolute()) for path in files], counts, "<u1", starts, length)
    return stream, Bytes().about()


def _characters(files: Sequence[Path], length: int, context: PackContext) -> _Made:
    tasks = tasks_of(files)
    results = _run(CharacterTask(tasks), range(len(tasks)), context, "reading")
    letters = merge_characters(letters for _, letters in results)
    job = TokenTask(tasks, str(context.spool), width_for(len(letters)), letters=letters)
    return _stream(job, length, context), Characters(letters).about()


def _tokens(files: Sequence[Path], request: PackRequest, context: PackContext) -> _Made:
    tasks = tasks_of(files)
    path = context.spool / TOKENIZER
    if not path.exists():
        write_whole(path, _tokenizer(request, tasks, context))
    tokens = load_tokenizer(path)
    end = tokens.end if request.length else -1
    job = TokenTask(tasks, str(context.spool), width_for(tokens.size), tokenizer=str(path), end=end)
    return _stream(job, request.length, context), tokens.about()


def _tokenizer(
    request: PackRequest, tasks: Sequence[Sequence[TextPart]], context: PackContext
) -> bytes:
    """Return the given tokenizer file, or that of a newly trained tokenizer."""
    if request.tokenizer:
        return load_tokenizer(Path(request.tokenizer)).content
    context.progress("training a tokenizer", 0, 1)
    texts = (part.text() for part in itertools.chain(*tasks))
    return train_tokenizer(texts, request.train_tokenizer).encode()


def _stream(job: TokenTask, length: int, context: PackContext) -> Stream:
    """Encode all tasks that an interrupted pack has not finished."""
    done = job.done()
    left = [number for number in range(len(job.tasks)) if number not in done]
    done |= dict(_run(job, left, context, "encoding"))
    ordered = [done[number] for number in range(len(job.tasks))]
    documents = [0] * (1 + job.tasks[-1][-1].document)
    for part, count in zip(itertools.chain(*job.tasks), itertools.chain(*ordered), strict=True):
        documents[part.document] += count
    parts = [str(job.part(number)) for number in range(len(job.tasks))]
    starts = list(itertools.accumulate(documents, initial=0))
    return Stream(parts, [sum(counts) for counts in ordered], job.dtype, starts, length)


def _run(job: PackTask, numbers: Sequence[int], context: PackContext, what: str) -> Any:
    for count, result in enumerate(run_all(job, numbers, context.workers), 1):
        context.progress(f"{what} texts", count, len(numbers))
        yield result
