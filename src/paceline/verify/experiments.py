"""The cause of a difference between two world sizes, found by experiments.

The same world again shows chance. A trace of the step shows what differs first: samples, losses, gradients, buffers,
sums, options, weights or metrics. The same lanes on other ranks, in another order, beside other lanes show what that
depends on. What no experiment has shown is called not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.scale.batch import share
from paceline.verify.causes import Cause
from paceline.verify.records import STEPS, Record, is_repeat
from paceline.verify.traces import (
    ASPECTS,
    METRICS,
    Change,
    Trace,
    changed_lanes,
    distance,
    first_change,
    size_of,
)

_SHARE = 0.05
"""An experiment counts if it changes a lane by this share of the difference between the worlds; rounding does not."""
_ROUNDING = 1e-5
"""A smaller relative difference may be rounding, which several experiments change."""
_NAMED = 3


class Laboratory(Protocol):
    """Runs the script for an experiment."""

    def trace(self, world: int, step: int, arrangement: str) -> tuple[Record, Trace | None]:
        """Run the script once more with a trace of one step; return its record and the trace."""


@dataclass(frozen=True)
class Arrangement:
    """An experiment with the lanes of a step, and what it shows if their values change."""

    how: str
    why: str
    words: str

    @property
    def at_reference(self) -> bool:
        """Whether the world size of the reference shows it: an order needs no second rank."""
        return self.how == "reversed"


_REPEATS = 3
"""Runs that look for what changes by chance."""
_FOR_LANES = (
    Arrangement("reversed", "order", "lanes in reverse order on their rank"),
    Arrangement("partners", "others", "lanes of rank 0 while other ranks run theirs in reverse order"),
    Arrangement("swapped", "rank", "lanes on other ranks"),
    Arrangement("dealt", "local", "lanes beside other lanes on their rank"),
)  # fmt: skip
_FOR_METRICS = (
    Arrangement("reversed", "order", "batches of the evaluation in reverse order"),
    Arrangement("swapped", "rank", "batches of the evaluation on other ranks"),
)


class Experiments:
    """Finds why a world differs from the reference in a step."""

    def __init__(
        self, laboratory: Laboratory, records: dict[int, Record], world: int, step: int
    ) -> None:
        self._laboratory, self._records = laboratory, records
        self._reference, self._world = next(iter(records)), world
        self._is_initial = step == 0
        self._step = max(1, step)
        self._shown: list[str] = []
        self._traces: dict[int, Trace] = {}
        self._last: Trace | None = None

    def find(self, tensor: str) -> Cause:
        """Return the cause, or one that is not known, with what was tried."""
        for world in (self._reference, self._world):
            record, trace = self._laboratory.trace(world, self._step, "usual")
            if not is_repeat(self._records[world], record):
                return self._chance(world, trace)
            if trace is not None:
                self._traces[world] = trace
        self._shown.append(f"world sizes {self._reference} and {self._world} repeat their bits")
        if tensor == STEPS:
            return self._cause("steps", "world", [])
        if len(self._traces) < 2:
            self._shown.append("FSDP and local SGD have no trace of a step: try parallel=ddp")
            return self._cause("", "", [])
        change = first_change(self._traces[self._reference], self._traces[self._world])
        return self._cause_of(change) if change else self._cause("", "", [])

    def _chance(self, world: int, trace: Trace | None) -> Cause:
        self._shown.append(f"world size {world} gave other bits when it ran again")
        for _ in range(_REPEATS):  # two runs may agree by chance
            _, again = self._laboratory.trace(world, self._step, "usual")
            change = first_change(trace, again) if trace and again else None
            if change:
                return self._cause(self._name(change.where), "chance", change.names)
        self._shown.append(f"the traces of {_REPEATS} more runs do not differ in this step")
        return self._cause("", "", [])

    def _cause_of(self, change: Change) -> Cause:
        if change.where in ASPECTS:
            return self._cause_in_lanes(change)
        if change.where == "evaluation":
            return self._cause_in_metrics(change)
        names = _shorten(change.names)
        if change.ranks:
            ranks = ", ".join(map(str, change.ranks))
            self._shown.append(f"rank {ranks} has other values than rank 0 in {names}")
        else:
            self._shown.append(f"all ranks of a world have the same values in {names}")
        why = "rank" if change.ranks else "world"
        return self._cause(self._name(change.where), why, change.names)

    def _name(self, where: str) -> str:
        """Return the name of what differs: before the first step the state is the initial one."""
        if where != "state":
            return where
        return "initial state" if self._is_initial or self._step == 1 else "loop"

    def _cause_in_lanes(self, change: Change) -> Cause:
        self._choose_world(change.where)
        reference, usual = self._traces[self._reference], self._traces[self._world]
        scale = distance(reference, usual, change.where, change.names)
        is_rounding = scale <= _ROUNDING * size_of(reference, change.where, change.names)
        untested, hits = [], []
        for experiment in _FOR_LANES:
            world = self._reference if experiment.at_reference else self._world
            if not _matters(len(reference.named("lane")), world, experiment.how):
                untested.append(experiment)
                continue
            moved = self._moved_lanes(world, experiment, change.where, scale)
            if moved is None:
                untested.append(experiment)
            if moved and not self._repeats(world, experiment, change.where):
                return self._cause(change.where, "chance", moved)
            if moved and not is_rounding:
                return self._cause(change.where, experiment.why, moved)
            hits += [(experiment.why, moved)] if moved else []
        if len(hits) == 1:
            return self._cause(change.where, *hits[0])
        if hits:
            self._shown.append("the difference is as small as rounding, which all of these change")
            return self._cause(change.where, "", change.names)
        for experiment in untested:
            self._shown.append(f"{experiment.words}: not possible with these lanes")
        return self._cause(change.where, "" if untested else "world", change.names)

    def _choose_world(self, aspect: str) -> None:
        """Experiment at a world size with two lanes or more per rank, if that one differs, too."""
        lanes = len(self._traces[self._reference].named("lane"))
        smaller = lanes // 2
        if lanes // self._world >= 2 or smaller < 2 or smaller == self._reference:
            return
        _, trace = self._laboratory.trace(smaller, self._step, "usual")
        if trace and changed_lanes(self._traces[self._reference], trace, aspect):
            self._world, self._traces[smaller] = smaller, trace

    def _moved_lanes(
        self, world: int, experiment: Arrangement, aspect: str, scale: float
    ) -> list[str] | None:
        """Return the lanes whose values an arrangement changes; None if the lanes could not be arranged."""
        usual = self._traces[world]
        _, trace = self._laboratory.trace(world, self._step, experiment.how)
        if trace is None or trace.lanes_of == usual.lanes_of:
            return None
        moved = []
        for lane in changed_lanes(usual, trace, aspect):
            is_watched = experiment.how != "partners" or lane in usual.lanes_of[0]
            if is_watched and distance(usual, trace, aspect, [lane]) >= _SHARE * scale:
                moved.append(lane)
        self._say(world, experiment, moved, aspect)
        self._last = trace
        return moved

    def _repeats(self, world: int, experiment: Arrangement, aspect: str) -> bool:
        """Return whether the last experiment gives the same again; otherwise it has shown chance, not its cause."""
        _, again = self._laboratory.trace(world, self._step, experiment.how)
        changed = changed_lanes(self._last, again, aspect) if self._last and again else []
        if changed:
            self._shown.append(f"the same again: other {aspect} in {_shorten(changed)}")
        return not changed

    def _cause_in_metrics(self, change: Change) -> Cause:
        reference, usual = self._traces[self._reference], self._traces[self._world]
        batches = changed_lanes(reference, usual, METRICS)
        if not batches:
            self._shown.append("no batch of the evaluation has other sums")
            return self._cause("evaluation", "", change.names)
        scale = distance(reference, usual, METRICS, batches)
        for experiment in _FOR_METRICS:
            world = self._reference if experiment.at_reference else self._world
            if self._moved_lanes(world, experiment, METRICS, scale):
                is_stable = self._repeats(world, experiment, METRICS)
                why = experiment.why if is_stable else "chance"
                return self._cause("evaluation", why, change.names)
        return self._cause("evaluation", "world", change.names)

    def _say(self, world: int, experiment: Arrangement, moved: list[str], aspect: str) -> None:
        result = f"other {aspect} in {_shorten(moved)}" if moved else f"the same {aspect}"
        self._shown.append(f"world size {world}, {experiment.words}: {result}")

    def _cause(self, where: str, why: str, names: list[str]) -> Cause:
        draws = where in ASPECTS and any(trace.draws_in_body for trace in self._traces.values())
        if draws:
            self._shown.append("the body of the loop draws random numbers before run.update")
        return Cause(where, why, names, list(self._shown), draws_in_body=draws)


def arranged(lanes: int, rank: int, size: int, how: str) -> list[int]:
    """Return the lanes of a rank in an experiment of `paceline verify`; each rank has as many as usual.

    Swapped: other ranks, the same order. Reversed: the same ranks, in reverse order. Partners: only rank 0 as usual.
    Dealt: lanes share a rank with others.

    >>> [arranged(4, rank, 2, "swapped") for rank in range(2)], [arranged(4, rank, 2, "dealt") for rank in range(2)]
    ([[2, 3], [0, 1]], [[0, 2], [1, 3]])
    >>> arranged(4, 0, 1, "reversed"), [arranged(4, rank, 2, "partners") for rank in range(2)]
    ([3, 2, 1, 0], [[0, 1], [3, 2]])
    """
    mine = share(lanes, rank, size)
    if how == "swapped":
        first = len(share(lanes, 0, size))
        return [(lane + first) % lanes for lane in mine]
    if how == "dealt":
        order = sorted(range(lanes), key=lambda lane: lane % size)
        return [order[lane] for lane in mine]
    is_reversed = how == "reversed" or (how == "partners" and rank > 0)
    return list(reversed(mine)) if is_reversed else list(mine)


def _matters(lanes: int, world: int, how: str) -> bool:
    """Return whether an arrangement changes anything.

    >>> _matters(4, 2, "dealt"), _matters(4, 4, "partners")
    (True, False)
    """
    ranks = range(world)
    return any(
        arranged(lanes, rank, world, how) != list(share(lanes, rank, world)) for rank in ranks
    )


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
