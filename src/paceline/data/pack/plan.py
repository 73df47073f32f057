"""What of an interrupted pack can be kept: its plan, and the shards that were finished, as long as there is no index."""

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

from paceline.data.shards.index import INDEX, ShardFacts
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.rundir import make_private, write_whole

PLAN = ".plan.jsonl"
"""Which pack is under way in a folder, and a line for every shard that it has finished."""
SPOOL = ".spool"
"""The folder of what must be made before the first shard."""

_OURS = r"(?:\d{5,9}\.safetensors|index\.json|tokenizer\.json)"
_PARTIAL = re.compile(rf"\.(?:{_OURS}|\.plan\.jsonl)\.[0-9a-f]{{8}}")
_START_OVER = (
    "repeat the command that began it, name another folder with --to, or start over with --force"
)


class Journal:
    """The plan of a set that is being made."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self._digest = folder, digest
        self.finished: dict[str, ShardFacts] = {}
        """The shards that need not be made again, by name."""

    @property
    def spool(self) -> Path:
        """The folder of what must be made before the first shard."""
        return self.folder / SPOOL

    def begin(self, *, force: bool = False) -> bool:
        """Take the folder for this plan, and find what is kept; return whether the set is whole already."""
        theirs = plan_in(self.folder)
        if theirs and theirs[0] == self._digest:
            if (self.folder / INDEX).exists():
                return True
            self.finished = _whole_ones(self.folder, theirs[1:])
        elif not force:
            _refuse_others(self.folder, has_plan=bool(theirs))
        _clear(
            self.folder,
            keep={*self.finished, SPOOL}
            if self.finished or theirs[:1] == [self._digest]
            else set(),
        )
        lines = [
            json.dumps({"plan": self._digest}),
            *(json.dumps(asdict(one)) for one in self.finished.values()),
        ]
        write_whole(self.folder / PLAN, "".join(f"{line}\n" for line in lines).encode())
        make_private(self.spool)
        return False

    def note(self, facts: ShardFacts) -> None:
        """Write down that a shard is finished."""
        self.finished[facts.name] = facts
        with (self.folder / PLAN).open("a") as file:
            file.write(json.dumps(asdict(facts)) + "\n")

    def end(self) -> None:
        """Remove what only the making needed; the plan last, so that what is left is known for what it is."""
        _clear_partial(self.folder)
        shutil.rmtree(self.spool, ignore_errors=True)
        (self.folder / PLAN).unlink(missing_ok=True)


def plan_in(folder: Path) -> list[str]:
    """Return the digest of the plan that a folder was taken for, and the lines that follow; nothing if there is none."""
    try:
        first, *lines = (folder / PLAN).read_text(errors="replace").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return [str(json.loads(first)["plan"]), *lines]
    except (ValueError, KeyError, TypeError):
        return ["damaged"]


def _whole_ones(folder: Path, lines: list[str]) -> dict[str, ShardFacts]:
    """Return the shards of which every byte is as it was noted."""
    found: dict[str, ShardFacts] = {}
    for line in lines:
        with contextlib.suppress(
            ValueError, TypeError, OSError
        ):  # a line that was cut off, a shard that is not there
            facts = ShardFacts(**json.loads(line))
            if re.fullmatch(_OURS, facts.name) and checksum_of(folder / facts.name) == facts.xxh3:
                found[facts.name] = facts
    return found


def checksum_of(path: Path) -> str:
    """Return the sum of a file's bytes."""
    total = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _refuse_others(folder: Path, *, has_plan: bool) -> None:
    """Refuse a folder that holds something else, which would be lost."""
    if (folder / INDEX).exists():
        raise ConfigError(
            f"{folder} holds a set already",
            fix="name another folder with --to, or pack over it with --force",
        )
    inside = [path.name for path in folder.iterdir() if re.fullmatch(_OURS, path.name)]
    if has_plan and inside:
        raise ConfigError(
            f"{folder} holds what was begun with another input, other options, or files that have changed since",
            fix=_START_OVER,
        )
    if inside:
        raise ConfigError(
            f"{folder} holds {min(inside)}, which would be written over",
            fix="name another folder with --to, or pack over it with --force",
        )


def _clear(folder: Path, keep: set[str]) -> None:
    """Remove what a pack has made; the index first, so that no set is ever there that is not whole."""
    (folder / INDEX).unlink(missing_ok=True)
    _clear_partial(folder)
    for path in folder.iterdir():
        if re.fullmatch(_OURS, path.name) and path.name not in keep:
            path.unlink()
    if SPOOL not in keep:
        shutil.rmtree(folder / SPOOL, ignore_errors=True)


def _clear_partial(folder: Path) -> None:
    """Remove files that a killed process was writing."""
    for path in folder.iterdir():
        if _PARTIAL.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other packs out of it; a failure to write says what to do."""
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
    """Return what to say of a failure to read an input or to write into a folder."""
    return EnvironmentUnfit(
        f"cannot read or write {error.filename or folder}: {error.strerror or error}",
        fix="check that it is there, who may use it, and how much space is left; the same command goes on",
    )


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is packing into {folder}",
            fix="wait for it, or name another folder with --to",
        ) from error
    except OSError:
        return  # a file system without locks: both would write the same bytes, or find the other's plan
