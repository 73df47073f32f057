"""The checkpoints of a run, and the state of each: intact, damaged, or of a newer format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from paceline.checkpoint.manifest import Manifest, NewerFormat
from paceline.checkpoint.storage import (
    FINAL,
    Storage,
    folder_name,
    read_manifest,
    step_of,
    verify_file,
)
from paceline.errors import BadCheckpoint, ConfigError, EnvironmentUnfit, PacelineError

T = TypeVar("T")

SAVE_FIRST = "train until one is saved; checkpoint.every sets the interval"


@dataclass(frozen=True)
class Catalog:
    """The storage of a run's checkpoints, with the settings that matter for them."""

    storage: Storage
    best: str = ""
    only: int | None = None
    """The step of the one checkpoint that the user named."""

    @property
    def where(self) -> str:
        """The path or address, for messages."""
        return self.storage.address if self.only is None else self.storage.where(self.only)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first."""
        with reading(self.where):
            return sorted(step for step in self.storage.steps() if self.only in {None, step})

    def final(self) -> Catalog | None:
        """Return the weights that the script made of the newest checkpoint after the loop; None: there are none."""
        steps = self.steps()
        final = Catalog(self.storage.within(FINAL))
        if self.only is not None or not steps or final.steps()[-1:] != steps[-1:]:
            return None
        return final

    def narrowed(self, step: int) -> Catalog:
        """Return a catalog of one step; raise with the available steps if it does not exist."""
        steps = self.steps()
        if step in steps:
            return replace(self, only=step)
        fix = f"use one of: {', '.join(map(str, steps))}" if steps else SAVE_FIRST
        raise ConfigError(f"there is no checkpoint of step {step} in {self.where}", fix=fix)


class Entry(NamedTuple):
    """The state of one checkpoint."""

    step: int
    where: str
    verdict: Literal["ok", "damaged", "newer"]
    manifest: Manifest | None = None
    problems: tuple[str, ...] = ()


class Remnant(NamedTuple):
    """A folder beside the checkpoints that is not a checkpoint."""

    name: str
    kind: Literal["aside", "leftover"]
    size_bytes: int


def list_entries(storage: Storage) -> tuple[list[Entry], list[Remnant]]:
    """Return the checkpoints, oldest first, and other folders, from names, sizes and manifests only."""
    entries = []
    with reading(storage.address):
        steps, sizes = sorted(storage.steps()), storage.sizes()
        for step in steps:
            entry = _entry(storage, step, lambda manifest: _wrong_sizes(manifest, sizes))
            if entry:
                entries.append(entry)
    return entries, _remnants(sizes, steps)


def verify_entry(storage: Storage, step: int) -> Entry | None:
    """Verify every byte of a checkpoint; None if a running training deleted it meanwhile."""
    return _entry(storage, step, lambda manifest: _wrong_bytes(storage, manifest))


def use_newest(catalog: Catalog, load: Callable[[int], T]) -> tuple[T, tuple[str, ...]]:
    """Return `load(step)` of the newest intact step, and the problems of newer ones.

    A step that was named is never replaced.
    """
    problems: list[str] = []
    for step in reversed(catalog.steps()):
        try:
            return load(step), tuple(problems)
        except NewerFormat as error:
            raise BadCheckpoint(
                error.problem, fix=f"update paceline, or {_alternative(catalog, step)}"
            ) from error
        except BadCheckpoint as error:
            problems.append(error.problem)
            if catalog.only is not None:
                raise BadCheckpoint(error.problem, fix=_alternative(catalog, step)) from error
    if problems:
        raise BadCheckpoint(
            f"no checkpoint in {catalog.where} is intact: {problems[0]}",
            fix="restore it from a backup, or train again",
        )
    raise PacelineError(f"there are no checkpoints in {catalog.where}", fix=SAVE_FIRST)


def _alternative(catalog: Catalog, bad: int) -> str:
    """Return a fix that names the newest intact checkpoint before a damaged one, else after it."""
    for step in sorted(catalog.storage.steps(), key=lambda step: (step > bad, -step)):
        if step != bad and (entry := verify_entry(catalog.storage, step)) and entry.verdict == "ok":
            return f"use {entry.where}, which is intact"
    return "restore it from a backup: no other checkpoint here is intact"


def _entry(
    storage: Storage, step: int, find_problems: Callable[[Manifest], list[str]]
) -> Entry | None:
    where, manifest = storage.where(step), None
    try:
        manifest = read_manifest(storage, step)
        problems = find_problems(manifest)
    except NewerFormat as error:
        return Entry(step, where, "newer", problems=(error.problem.removeprefix(f"{where} has "),))
    except BadCheckpoint as error:
        problems = [_why(error, where)]
    if problems and step not in storage.steps():
        return None
    return Entry(step, where, "damaged" if problems else "ok", manifest, tuple(problems))


def _wrong_sizes(manifest: Manifest, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
    stored = sizes.get(folder_name(manifest.step), {})
    problems = []
    for name, facts in manifest.files.items():
        if name not in stored:
            problems.append(f"{name} is missing")
        elif stored[name] != facts.size_bytes:
            problems.append(f"{name} has {stored[name]:,} bytes instead of {facts.size_bytes:,}")
    return problems


def _wrong_bytes(storage: Storage, manifest: Manifest) -> list[str]:
    problems = []
    for name, facts in manifest.files.items():
        try:
            verify_file(storage, manifest.step, name, facts)
        except BadCheckpoint as error:
            problems.append(_why(error, storage.where(manifest.step)))
    return problems


def _why(error: BadCheckpoint, where: str) -> str:
    return error.problem.removeprefix(f"{where} is damaged: ")


def _remnants(sizes: Mapping[str, Mapping[str, int]], steps: list[int]) -> list[Remnant]:
    """Return checkpoints that were set aside, and leftovers of interrupted saves and deletions."""
    remnants = []
    for name, files in sorted(sizes.items()):
        step = step_of(name)
        uncommitted = step is not None and step not in steps
        aside = name.startswith("aside-step-")
        if aside or uncommitted or name.startswith((".step-", ".deleted-step-")):
            kind: Literal["aside", "leftover"] = "aside" if aside else "leftover"
            remnants.append(Remnant(name, kind, sum(files.values())))
    return remnants


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn an OSError into an error that names the path and the fix."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot read {where}: {error.strerror or error}",
            fix="check the path and its permissions",
        ) from error
