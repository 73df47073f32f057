"""Resume an interrupted pack: its plan, and the shards that it has finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import xxhash

from paceline.data.shards.index import INDEX, LONGEST_INDEX, ShardFacts
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.rundir import make_private, write_whole
from paceline.safe_open import open_to_write, parse_json, read_bytes, reading

PLAN = ".plan.jsonl"
"""The digest of the current pack of a folder, and one line per finished shard."""
SPOOL = ".spool"
"""Folder for intermediate files."""

_OURS = r"(?:\d{5,9}\.safetensors|index\.json|tokenizer\.json)"
_PARTIAL = re.compile(rf"\.(?:{_OURS}|\.plan\.jsonl)\.[0-9a-f]{{8}}")
_START_OVER = "repeat the command that started it, choose another folder with --to, or start over with --force"


class Journal:
    """The plan file of a dataset that is being packed."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self._digest = folder, digest
        self.finished: dict[str, ShardFacts] = {}
        """Finished shards, by name."""

    @property
    def spool(self) -> Path:
        """The folder for intermediate files."""
        return self.folder / SPOOL

    def begin(self, *, force: bool = False) -> bool:
        """Start or resume this plan in the folder.

        Return whether the dataset is complete already.
        """
        plan = plan_in(self.folder)
        same = plan[:1] == [self._digest]
        if same:
            if (self.folder / INDEX).exists():
                return True
            self.finished = _intact_shards(self.folder, plan[1:])
        elif not force:
            _refuse_others(self.folder, has_plan=bool(plan))
        _clear(self.folder, keep={*self.finished, SPOOL} if same else set())
        lines = [{"plan": self._digest}, *map(asdict, self.finished.values())]
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_whole(self.folder / PLAN, content.encode())
        make_private(self.spool)
        return False

    def note(self, facts: ShardFacts) -> None:
        """Append a finished shard to the plan."""
        self.finished[facts.name] = facts
        file = open_to_write(self.folder / PLAN, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(file, "w", encoding="utf-8") as plan:
            plan.write(json.dumps(asdict(facts)) + "\n")

    def end(self) -> None:
        """Remove intermediate files; the plan last, so that leftovers can be identified."""
        _clear_partial(self.folder)
        shutil.rmtree(self.spool, ignore_errors=True)
        (self.folder / PLAN).unlink(missing_ok=True)


def plan_in(folder: Path) -> list[str]:
    """Return the digest in the plan of a folder and the lines after it.

    Return an empty list without a plan.
    """
    try:
        first, *lines = (
            read_bytes(folder / PLAN, LONGEST_INDEX).decode(errors="replace").split("\n")
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return [str(parse_json(first)["plan"]), *lines]
    except (ValueError, KeyError, TypeError):
        return ["damaged"]


def _intact_shards(folder: Path, lines: list[str]) -> dict[str, ShardFacts]:
    """Return the shards in the plan whose checksums are right."""
    intact: dict[str, ShardFacts] = {}
    for line in lines:
        # A line may be truncated, and a shard may be missing.
        with contextlib.suppress(ValueError, TypeError, OSError):
            facts = ShardFacts(**parse_json(line))
            if re.fullmatch(_OURS, facts.name) and checksum_of(folder / facts.name) == facts.xxh3:
                intact[facts.name] = facts
    return intact


def checksum_of(path: Path) -> str:
    """Return the XXH3 checksum of a file."""
    checksum = xxhash.xxh3_64()
    with reading(path, links=True) as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def _refuse_others(folder: Path, *, has_plan: bool) -> None:
    """Raise if files of another dataset or plan would be overwritten."""
    if (folder / INDEX).exists():
        raise ConfigError(
            f"{folder} already contains a dataset",
            fix="choose another folder with --to, or overwrite it with --force",
        )
    inside = [path.name for path in folder.iterdir() if re.fullmatch(_OURS, path.name)]
    if has_plan and inside:
        raise ConfigError(
            f"{folder} contains an unfinished pack of another input, with other options, or of files that have changed",
            fix=_START_OVER,
        )
    if inside:
        raise ConfigError(
            f"{folder} contains {min(inside)}, which would be overwritten",
            fix="choose another folder with --to, or overwrite it with --force",
        )


def _clear(folder: Path, keep: set[str]) -> None:
    """Remove packed files; the index first, so that no incomplete dataset has one."""
    (folder / INDEX).unlink(missing_ok=True)
    _clear_partial(folder)
    for path in folder.iterdir():
        if re.fullmatch(_OURS, path.name) and path.name not in keep:
            path.unlink()
    if SPOOL not in keep:
        shutil.rmtree(folder / SPOOL, ignore_errors=True)


def _clear_partial(folder: Path) -> None:
    """Remove temporary files of a killed process."""
    for path in folder.iterdir():
        if _PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it against other packs; turn an OSError into an error with a fix."""
    try:
        descriptor = os.open(make_private(folder), os.O_RDONLY)
        try:
            _lock(descriptor, folder)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, folder) from error


def storage_error(error: OSError, folder: str | Path) -> EnvironmentUnfit:
    """Return the error for a failure to read an input or to write into a folder."""
    return EnvironmentUnfit(
        f"cannot read or write {error.filename or folder}: {error.strerror or error}",
        fix="check that it exists, its permissions and the free space, then repeat the command to resume",
    )


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is packing into {folder}",
            fix="wait for it, or choose another folder with --to",
        ) from error
    except OSError:
        return  # no locks here: two packs write the same bytes, or see each other's plan
