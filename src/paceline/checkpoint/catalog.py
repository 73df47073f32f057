"""Which checkpoints a run has, and in what state they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from paceline.checkpoint.manifest import Manifest, NewerFormat
from paceline.checkpoint.storage import Storage, folder_name, read_manifest, step_of, verify_file
from paceline.errors import BadCheckpoint, ConfigError, EnvironmentUnfit, PacelineError

T = TypeVar("T")

SAVE_FIRST = "train until one is saved; checkpoint.every says how often that is"


@dataclass(frozen=True)
class Catalog:
    """Where the checkpoints of a run lie, and what its settings say of them."""

    storage: Storage
    best: str = ""
    only: int | None = None
    """The one checkpoint that was asked for by its own name."""

    @property
    def where(self) -> str:
        """The name of the place, for people."""
        return self.storage.address if self.only is None else self.storage.where(self.only)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that exist, the oldest first."""
        with reading(self.where):
            return sorted(step for step in self.storage.steps() if self.only in {None, step})

    def narrowed(self, step: int) -> Catalog:
        """Return a catalog of one step; say which there are if it is not there."""
        steps = self.steps()
        if step in steps:
            return replace(self, only=step)
        fix = f"use one of: {', '.join(map(str, steps))}" if steps else SAVE_FIRST
        raise ConfigError(f"there is no checkpoint of step {step} in {self.where}", fix=fix)


class Entry(NamedTuple):
    """What a look at one checkpoint found."""

    step: int
    where: str
    verdict: Literal["ok", "damaged", "newer"]
    manifest: Manifest | None = None
    problems: tuple[str, ...] = ()


class Remnant(NamedTuple):
    """A folder beside the checkpoints that no reader takes for one."""

    name: str
    kind: Literal["aside", "leftover"]
    size_bytes: int


def list_entries(storage: Storage) -> tuple[list[Entry], list[Remnant]]:
    """Look at names, sizes and manifests only; return the checkpoints, the oldest first, and what lies beside them."""
    with reading(storage.address):
        steps, sizes = sorted(storage.steps()), storage.sizes()
        found = [
            _look(storage, step, lambda manifest: _wrong_sizes(manifest, sizes)) for step in steps
        ]
    return [entry for entry in found if entry], _remnants(sizes, steps)


def verify_entry(storage: Storage, step: int) -> Entry | None:
    """Read every byte of a checkpoint; None if it is gone, as old ones go while their run trains on."""
    return _look(storage, step, lambda manifest: _wrong_bytes(storage, manifest))


def use_newest(catalog: Catalog, take: Callable[[int], T]) -> tuple[T, tuple[str, ...]]:
    """Return what `take` makes of the newest good step, and what is wrong with newer ones; one that was asked for is never replaced."""
    problems: list[str] = []
    for step in reversed(catalog.steps()):
        try:
            return take(step), tuple(problems)
        except NewerFormat as error:
            raise BadCheckpoint(
                error.problem, fix=f"update paceline, or {_instead(catalog, step)}"
            ) from error
        except BadCheckpoint as error:
            problems.append(error.problem)
            if catalog.only is not None:
                raise BadCheckpoint(error.problem, fix=_instead(catalog, step)) from error
    if problems:
        raise BadCheckpoint(
            f"no checkpoint in {catalog.where} is good: {problems[0]}",
            fix="look for a copy of it, or train again",
        )
    raise PacelineError(f"there are no checkpoints in {catalog.where}", fix=SAVE_FIRST)


def _instead(catalog: Catalog, bad: int) -> str:
    """Return what to do instead: the newest good checkpoint before a bad one, else after it."""
    for step in sorted(catalog.storage.steps(), key=lambda step: (step > bad, -step)):
        if step != bad and (entry := verify_entry(catalog.storage, step)) and entry.verdict == "ok":
            return f"take {entry.where}, of which every byte is right"
    return "look for a copy of it: no other checkpoint here is good"


def _look(storage: Storage, step: int, see: Callable[[Manifest], list[str]]) -> Entry | None:
    where, manifest = storage.where(step), None
    try:
        manifest = read_manifest(storage, step)
        problems = see(manifest)
    except NewerFormat as error:
        return Entry(step, where, "newer", problems=(error.problem.removeprefix(f"{where} has "),))
    except BadCheckpoint as error:
        problems = [_why(error, where)]
    if problems and step not in storage.steps():
        return None
    return Entry(step, where, "damaged" if problems else "ok", manifest, tuple(problems))


def _wrong_sizes(manifest: Manifest, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
    there = sizes.get(folder_name(manifest.step), {})
    return [
        f"{name} has {there[name]:,} bytes instead of {facts.size_bytes:,}"
        if name in there
        else f"{name} is missing"
        for name, facts in manifest.files.items()
        if there.get(name) != facts.size_bytes
    ]


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
    """Return what was set aside, and what interrupted saves and deletions left."""
    found = []
    for name, files in sorted(sizes.items()):
        step = step_of(name)
        unmade = step is not None and step not in steps
        aside = name.startswith("aside-step-")
        if aside or unmade or name.startswith((".step-", ".deleted-step-")):
            found.append(Remnant(name, "aside" if aside else "leftover", sum(files.values())))
    return found


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn a failure to read into an error that names the place and the way out."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot read {where}: {error.strerror or error}",
            fix="check the path, and that you may read it",
        ) from error
