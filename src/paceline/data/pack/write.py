"""Pack an input: prepare it, split it into shards, write them with workers, and write the index last."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.data.pack.arrays import parse_input
from paceline.data.pack.input_kinds import Kind, input_from, kind_of, tree_of
from paceline.data.pack.inputs import PackContext, Prepared, Progress, silent
from paceline.data.pack.plan import Journal, locked_folder
from paceline.data.pack.pool import run_all
from paceline.data.pack.request import PackRequest
from paceline.data.pack.shard_writer import plan_shards, shard_name
from paceline.data.shards.index import INDEX, LONGEST_INDEX, DatasetIndex, ShardFacts
from paceline.errors import ConfigError, DataError
from paceline.rundir import write_whole
from paceline.safe_open import read_bytes, read_json

_READY = "ready.json"


def pack(
    request: PackRequest,
    folder: Path,
    *,
    workers: int = 0,
    force: bool = False,
    progress: Progress = silent,
) -> DatasetIndex:
    """Pack a dataset, or resume the same pack.

    The number of workers (0: one per core) does not change a byte.
    """
    kind = kind_of(request)
    _refuse_inside(request, folder)
    files = _find_files(kind, request)
    digest = request.digest(files)
    with locked_folder(folder):
        journal = Journal(folder, digest)
        if not journal.begin(force=force):
            context = PackContext(journal.spool, workers or _cores(), progress)
            index = _make(journal, _prepared(kind, request, files, context), request, context)
            if request.digest(_find_files(kind, request)) != digest:
                raise DataError(
                    f"{', '.join(request.inputs)} changed while it was packed",
                    fix="pack it again with --force",
                )
            write_whole(folder / INDEX, index.to_json())
        journal.end()
        return DatasetIndex.from_json(
            read_bytes(folder / INDEX, LONGEST_INDEX), str(folder / INDEX)
        )


def _refuse_inside(request: PackRequest, folder: Path) -> None:
    for path in map(Path, request.inputs):
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                f"--to {folder} is inside the input {path}", fix="choose a folder outside of it"
            )


def _find_files(kind: Kind, request: PackRequest) -> list[Path]:
    files = kind.find(request)
    if not files:
        raise DataError(
            f"{', '.join(request.inputs)} contains no file to pack",
            fix="name an input that is not empty",
        )
    return files


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepared(
    kind: Kind, request: PackRequest, files: Sequence[Path], context: PackContext
) -> Prepared:
    """Return the input, prepared now or by an interrupted pack."""
    note, spool = context.spool / _READY, str(context.spool.absolute())
    if note.exists():
        tree = read_json(note, LONGEST_INDEX)
        if tree["spool"] == spool:  # else the folder was moved
            return Prepared(input_from(tree["input"]), tree["about"], tree["beside"])
    prepared = kind.prepare(request, files, context)
    names = [parse_input(argument)[1].name for argument in request.inputs]
    about = {"from": names, **prepared.about}
    tree = {
        "spool": spool,
        "input": tree_of(prepared.input),
        "about": about,
        "beside": dict(prepared.beside),
    }
    write_whole(note, json.dumps(tree).encode())
    return Prepared(prepared.input, about, prepared.beside)


def _make(
    journal: Journal, prepared: Prepared, request: PackRequest, context: PackContext
) -> DatasetIndex:
    """Write all shards that are not finished; return the index."""
    job = plan_shards(prepared.input, journal.folder, request.shard_bytes)
    left = [number for number in range(job.count) if shard_name(number) not in journal.finished]
    context.progress("packing shards", job.count - len(left), job.count)
    for _, facts in run_all(job, left, context.workers):
        journal.note(ShardFacts(**facts))
        context.progress("packing shards", len(journal.finished), job.count)
    for name, path in prepared.beside.items():
        write_whole(journal.folder / name, Path(path).read_bytes())
    shards = tuple(journal.finished[shard_name(number)] for number in range(job.count))
    return DatasetIndex(job.columns, job.samples_per_shard, shards, prepared.about)
