"""How an input becomes a set: made ready, cut into shards, written by workers, and last the index."""

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
from paceline.data.shards.index import INDEX, DatasetIndex, ShardFacts
from paceline.errors import ConfigError, DataError
from paceline.rundir import write_whole

_READY = "ready.json"


def pack(
    request: PackRequest,
    folder: Path,
    *,
    workers: int = 0,
    force: bool = False,
    progress: Progress = silent,
) -> DatasetIndex:
    """Make a set, or go on where the same pack was interrupted; how many workers (0: one a core) changes no byte."""
    kind = kind_of(request)
    _refuse_inside(request, folder)
    files = _found(kind, request)
    digest = request.digest(files)
    with locked_folder(folder):
        journal = Journal(folder, digest)
        if not journal.begin(force=force):
            shop = PackContext(journal.spool, workers or _cores(), progress)
            index = _make(journal, _ready(kind, request, files, shop), request, shop)
            if request.digest(_found(kind, request)) != digest:
                raise DataError(
                    f"{', '.join(request.words)} has changed while it was packed",
                    fix="pack it again, with --force",
                )
            write_whole(folder / INDEX, index.to_json())
        journal.end()
        return DatasetIndex.from_json((folder / INDEX).read_bytes(), str(folder / INDEX))


def _refuse_inside(request: PackRequest, folder: Path) -> None:
    for word in request.words:
        if Path(word).is_dir() and folder.resolve().is_relative_to(Path(word).resolve()):
            raise ConfigError(
                f"--to {folder} lies inside the input {word}", fix="name a folder outside of it"
            )


def _found(kind: Kind, request: PackRequest) -> list[Path]:
    files = kind.find(request)
    if not files:
        raise DataError(
            f"{', '.join(request.words)} holds no file to pack",
            fix="name an input that is not empty",
        )
    return files


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ready(kind: Kind, request: PackRequest, files: Sequence[Path], shop: PackContext) -> Prepared:
    """Return the input, made ready now or before an interruption."""
    note, here = shop.spool / _READY, str(shop.spool.absolute())
    if note.exists():
        tree = json.loads(note.read_bytes())
        if tree["spool"] == here:  # else the folder was moved
            return Prepared(input_from(tree["input"]), tree["about"], tree["beside"])
    found = kind.prepare(request, files, shop)
    about = {"from": [parse_input(word)[1].name for word in request.words], **found.about}
    tree = {
        "spool": here,
        "input": tree_of(found.input),
        "about": about,
        "beside": dict(found.beside),
    }
    write_whole(note, json.dumps(tree).encode())
    return Prepared(found.input, about, found.beside)


def _make(
    journal: Journal, prepared: Prepared, request: PackRequest, shop: PackContext
) -> DatasetIndex:
    """Write every shard that is not there; return what the index is to say."""
    job = plan_shards(prepared.input, journal.folder, request.shard_bytes)
    left = [number for number in range(job.count) if shard_name(number) not in journal.finished]
    shop.progress("packing shards", job.count - len(left), job.count)
    for _, facts in run_all(job, left, shop.workers):
        journal.note(ShardFacts(**facts))
        shop.progress("packing shards", len(journal.finished), job.count)
    for name, path in prepared.beside.items():
        write_whole(journal.folder / name, Path(path).read_bytes())
    shards = tuple(journal.finished[shard_name(number)] for number in range(job.count))
    return DatasetIndex(job.columns, job.samples_per_shard, shards, prepared.about)
