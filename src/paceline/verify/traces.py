"""What the ranks of a world computed in one step, and where two such traces first differ. Reads files only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.safe_open import parse_json, read_text

_LARGEST_BYTES = 1 << 30

BODY, DRAWS = "body", "draws"
"""The stage that tells whether the body of the loop has drawn random numbers, and the name of that fact."""

ASPECTS = ("samples", "loss", "gradients", "buffers")
"""What a trace says of a lane, in the order in which it is computed."""

METRICS = "metrics"
"""What a trace says of a batch of an evaluation."""

_UNITS = ("lane ", "batch ")
_GRADIENT = "the gradient of "

Facts = dict[str, str]
Stages = dict[str, Facts]


@dataclass(frozen=True)
class Trace:
    """One step of a world: the stages of each rank, and the lanes of all ranks."""

    ranks: list[Stages]
    lanes: dict[str, Facts] = field(default_factory=dict)
    """The lanes, and the batches of an evaluation, by name."""
    lanes_of: list[list[str]] = field(default_factory=list)
    """Those of each rank, in the order in which it ran them."""

    @property
    def draws_in_body(self) -> bool:
        """Whether the body of the loop drew random numbers before the first update."""
        return any(rank.get(BODY, {}).get(DRAWS) == "yes" for rank in self.ranks)

    def named(self, kind: str) -> list[str]:
        """Return the names of all lanes or batches."""
        return [name for name in self.lanes if name.startswith(f"{kind} ")]


@dataclass(frozen=True)
class Change:
    """The first stage of a step that differs between two traces."""

    where: str
    """samples, lanes, loss, gradients, buffers, sum, options, update, loop, evaluation or state."""
    names: list[str]
    """The tensors, options, metrics or lanes that differ."""
    ranks: list[int]
    """The ranks that differ from rank 0 of the same world."""

    def describe(self, name: str) -> str:
        """Return what differs in one of the names; some names say it themselves.

        >>> Change("loss", [], []).describe("lane 0"), Change("options", [], []).describe("the options of optimizer.0")
        ('the loss of lane 0', 'the options of optimizer.0')
        """
        return name if name.startswith("the ") else f"the {self.where} of {name}"


def trace_file(folder: Path, rank: int) -> Path:
    """Return the file of what a rank computed in one step, in the folder of a record."""
    return folder / f"{rank:04d}.trace"


def read_trace(folder: Path, world: int) -> Trace | None:
    """Read the traces of all ranks of a world; None if the run wrote none."""
    files = [trace_file(folder, rank) for rank in range(world)]
    if not all(file.is_file() for file in files):
        return None
    ranks: list[Stages] = []
    lanes: dict[str, Facts] = {}
    lanes_of: list[list[str]] = []
    for file in files:
        stages = _numbered(parse_json(read_text(file, _LARGEST_BYTES)))
        own = {name: facts for name, facts in stages.items() if name.startswith(_UNITS)}
        lanes |= own
        lanes_of.append(list(own))
        ranks.append({name: facts for name, facts in stages.items() if name not in own})
    return Trace(ranks, lanes, lanes_of)


def _numbered(stages: list[Any]) -> Stages:
    """Return stages by name; the second of one name gets a number, as in a step with two updates.

    >>> list(_numbered([("sum", {}), ("sum", {})]))
    ['sum', 'sum 2']
    """
    found: Stages = {}
    for name, facts in stages:
        number = 1 + sum(
            known == name
            or (known.startswith(f"{name} ") and known.removeprefix(f"{name} ").isdecimal())
            for known in found
        )
        found[name if number == 1 else f"{name} {number}"] = facts
    return found


def first_change(reference: Trace, other: Trace) -> Change | None:
    """Return the first stage that differs: the state before the step, the lanes, the sum, the update, the loop.

    Every rank of the other world is compared with rank 0 of the reference.
    """
    if change := start_change(reference, other):
        return change
    if change := lanes_change(reference, other):
        return change
    for stage in reference.ranks[0]:
        if stage == BODY:
            continue
        if change := _stage_change(reference, other, stage):
            return change
    return None


def start_change(reference: Trace, other: Trace) -> Change | None:
    """Return what differs before the step."""
    return _stage_change(reference, other, "start")


def lanes_change(reference: Trace, other: Trace) -> Change | None:
    """Return the first aspect of the lanes that differs: which there are, samples, loss, gradients, buffers."""
    names, others = set(reference.named("lane")), set(other.named("lane"))
    if names != others:
        return Change("lanes", sorted(names ^ others), [])
    for aspect in ASPECTS:
        if changed := changed_lanes(reference, other, aspect):
            return Change(aspect, changed, [])
    return None


def changed_lanes(reference: Trace, other: Trace, aspect: str) -> list[str]:
    """Return the lanes that differ in one aspect, among those that both traces have."""
    kind = "batch" if aspect == METRICS else "lane"
    both = [name for name in reference.named(kind) if name in other.lanes]
    return [name for name in both if reference.lanes[name][aspect] != other.lanes[name][aspect]]


def distance(reference: Trace, other: Trace, aspect: str, lanes: list[str]) -> float:
    """Return how far some lanes of two traces are apart; infinite for values that are no numbers."""
    largest = 0.0
    for name in lanes:
        pair = [float(trace.lanes[name][aspect].split()[1]) for trace in (reference, other)]
        apart = abs(pair[0] - pair[1])
        largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest


def size_of(trace: Trace, aspect: str, lanes: list[str]) -> float:
    """Return how large the values of some lanes are."""
    return max((abs(float(trace.lanes[name][aspect].split()[1])) for name in lanes), default=0.0)


def _stage_change(reference: Trace, other: Trace, stage: str) -> Change | None:
    expected = reference.ranks[0][stage]
    names: dict[str, None] = {}
    for rank in other.ranks:
        actual = rank.get(stage, {})
        added = [name for name in actual if name not in expected]
        for name in [*expected, *added]:
            if expected.get(name) != actual.get(name):
                names[name] = None
    if not names:
        return None
    first = other.ranks[0].get(stage, {})
    ranks = [
        number
        for number, rank in enumerate(other.ranks)
        if any(rank.get(stage, {}).get(name) != first.get(name) for name in names)
    ]
    gradients = [name for name in names if name.startswith(_GRADIENT)]
    if stage.startswith("before ") and gradients and "sum" not in reference.ranks[0]:
        return Change("sum", gradients, ranks)  # neither run.update nor run.backward was called
    return Change(_kind(stage, list(names)), list(names), ranks)


def _kind(stage: str, names: list[str]) -> str:
    """Return what differs, by the stage and the names.

    >>> _kind("before optimizer", ["the options of optimizer.0"]), _kind("end", ["model.a"])
    ('options', 'loop')
    """
    if names[0].startswith("the options of "):
        return "options"
    if stage.startswith("evaluation"):
        return "evaluation"
    if stage == "start":
        return "state"
    if stage.startswith("after "):
        return "update"
    return "sum" if all(name.startswith(_GRADIENT) for name in names) else "loop"
