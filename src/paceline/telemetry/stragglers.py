"""Which rank holds the others up, with what, and always or once? Wall time cannot tell: all wait for the slowest."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from paceline.scale.batch import share
from paceline.telemetry.heartbeat import NO_TIME, Beat
from paceline.telemetry.phases import PHASES, WAIT, PhaseTime
from paceline.units import short_time

CLEARLY = 1.2
"""From this ratio on, a rank is slower than the others, rather than unlucky."""

_WORTH = (
    0.05  # of a whole step, with all waiting: a rank that costs the others less holds nobody up
)
_ONCE = 3.0  # steps: a single delay that is shorter than so many is not worth a word
_ONCE_S = 0.1
_UNLIKE = 1.5
_BY_LANE = {"data", "forward", "backward"}

Kind = Literal["chronic", "one-off"]

PHASE_NAMES = {
    "data": "waiting for its samples",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer",
    "gc": "garbage collection",
    "other": "what comes between two steps",
}


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up."""

    beat: Beat
    times: float
    """Its own time a step, in terms of the median of the others; for a one-off, that of the one step."""
    phase: str = "other"
    """What it spends the time on."""
    kind: Kind = "chronic"
    more_s: float = 0.0
    """Seconds that the phase takes more than on the others: a step, or in the one step."""
    step: int = 0
    """Of a one-off, the step."""

    @property
    def cost_s(self) -> float:
        """Seconds that the others lost by it, of late."""
        return self.more_s * (1 if self.kind == "one-off" else max(1, self.beat.steps))

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What makes it another finding."""
        return self.beat.rank, self.phase, self.kind, self.step


def describe_straggler(slow: Straggler) -> str:
    """Return a finding as a sentence.

    >>> describe_straggler(Straggler(Beat(3, "n1", 9, 0.0, 0.2, 0.1), 2.0, "data", "chronic", 0.1))
    'rank 3 on n1 holds the others up: 100.0 ms more a step in waiting for its samples, 2.0 x their own time'
    >>> describe_straggler(Straggler(Beat(3, "n1", 9, 0.0, 0.2, 0.1), 9.0, "gc", "one-off", 1.5, step=8))
    'rank 3 on n1 held the others up once, in step 8: 1.50 s more in garbage collection'
    """
    rank, phase = (
        f"rank {slow.beat.rank} on {slow.beat.node}",
        PHASE_NAMES.get(slow.phase, slow.phase),
    )
    more = short_time(slow.more_s)
    if slow.kind == "one-off":
        return f"{rank} held the others up once, in step {slow.step:,}: {more} more in {phase}"
    return f"{rank} holds the others up: {more} more a step in {phase}, {slow.times:.1f} x their own time"


def read_beats(folder: Path, world_size: int, since_s: float) -> list[Beat]:
    """Return the beats of a world since it was started; those of an earlier one, which may lie around, say nothing."""
    found = [_read(path) for path in sorted(folder.glob("*.beat"))]
    return [beat for beat in found if beat and beat.rank < world_size and beat.time_s >= since_s]


def _read(path: Path) -> Beat | None:
    try:
        return Beat.parse(path.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None


def find_straggler(beats: Sequence[Beat], lanes: int, world_size: int) -> Straggler | None:
    """Return the rank that is clearly slower than those with as many lanes, or was once; nothing if none is.

    >>> beats = [Beat(rank, "n1", 9, 0.0, own_s, 0.0) for rank, own_s in enumerate([0.1, 0.1, 0.15, 0.11])]
    >>> found = find_straggler(beats, lanes=4, world_size=4)
    >>> found.beat.rank, found.times, found.kind
    (2, 1.5, 'chronic')
    >>> find_straggler(beats[:2], lanes=4, world_size=4) is None
    True
    >>> uneven = [Beat(rank, "n1", 9, 0.0, own_s, 0.0) for rank, own_s in enumerate([0.2, 0.1])]  # 2 lanes and 1
    >>> find_straggler(uneven, lanes=3, world_size=2) is None
    True
    >>> find_straggler([uneven[0], replace(uneven[1], own_s=10.0)], lanes=3, world_size=2).beat.rank
    1
    """
    groups = list(_alike(beats, lanes, world_size))
    chronic = [slow for group, clearly in groups for slow in _chronic(group, clearly)]
    once = [slow for group, _ in groups for slow in _once(group)]
    return max(chronic + once, key=lambda slow: slow.cost_s, default=None)


def _alike(
    beats: Sequence[Beat], lanes: int, world_size: int
) -> Iterator[tuple[list[Beat], float]]:
    """Yield beats that can be compared, and from which ratio on one is slower: those of ranks with as many lanes.

    Where a rank has no equal, all are compared by what a lane takes, which is not quite the same for few and for many.
    """
    alike: dict[int, list[Beat]] = defaultdict(list)
    for beat in beats:
        alike[len(share(lanes, beat.rank, world_size))].append(beat)
    if any(len(group) == 1 for group in alike.values()) and len(beats) > 1:
        most = max(alike)
        yield (
            [_stretched(beat, most / own) for own, group in alike.items() for beat in group],
            _UNLIKE,
        )
    else:
        yield from ((group, CLEARLY) for group in alike.values() if len(group) > 1)


def _stretched(beat: Beat, times: float) -> Beat:
    """Return a beat as if the rank had so many times as many lanes."""
    if times == 1.0:
        return beat
    phases = {
        name: PhaseTime(one.mean_s * times, one.steady_s * times, one.largest_s, one.largest_step)
        if name in _BY_LANE
        else one
        for name, one in beat.phases.items()
    }
    return replace(beat, own_s=beat.own_s * times, data_s=beat.data_s * times, phases=phases)


def _chronic(group: Sequence[Beat], clearly: float) -> Iterator[Straggler]:
    """Yield the rank whose own work takes longest in most steps, if it is clearly longer and matters."""
    steady = {beat.rank: _steady(beat) for beat in group}
    worst = max(group, key=lambda beat: sum(steady[beat.rank].values()))
    others = [steady[beat.rank] for beat in group if beat is not worst]
    more = {
        phase: steady[worst.rank][phase] - median(one[phase] for one in others) for phase in PHASES
    }
    phase = max(PHASES, key=lambda name: more[name])
    own, usual = sum(steady[worst.rank].values()), median(sum(one.values()) for one in others)
    times = round(own / max(usual, 1e-9), 2)
    whole = own + worst.phases.get(WAIT, NO_TIME).steady_s
    if times > clearly and own - usual > _WORTH * whole:
        yield Straggler(worst, times, phase, "chronic", more[phase])


def _steady(beat: Beat) -> Mapping[str, float]:
    """Return what each phase takes in most steps; of a beat that tells no phases, what it does tell."""
    if not beat.phases:
        return dict.fromkeys(PHASES, 0.0) | {
            "data": beat.data_s,
            "forward": beat.own_s - beat.data_s,
        }
    return {phase: beat.phases.get(phase, NO_TIME).steady_s for phase in PHASES}


def _once(group: Sequence[Beat]) -> Iterator[Straggler]:
    """Yield each phase of each rank that took far longer in one step than it ever did on the others."""
    own = [sum(_steady(beat).values()) for beat in group]
    usual_without = _medians_without(own)
    for phase in PHASES:
        largest = [beat.phases.get(phase, NO_TIME).largest_s for beat in group]
        for beat, mine, usual, others in zip(
            group, largest, usual_without, _medians_without(largest), strict=True
        ):
            if mine - others > max(_ONCE * usual, _ONCE_S):
                times = round((usual + mine - others) / max(usual, 1e-9), 2)
                yield Straggler(
                    beat, times, phase, "one-off", mine - others, beat.phases[phase].largest_step
                )


def _medians_without(values: Sequence[float]) -> list[float]:
    """Return, for each of two values or more, the median of the others; sorted once, as there may be thousands.

    >>> _medians_without([3.0, 1.0, 2.0, 9.0]), _medians_without([1.0, 5.0]), _medians_without([2.0, 2.0, 8.0])
    ([2.0, 3.0, 3.0, 2.0], [5.0, 1.0], [5.0, 5.0, 2.0])
    """
    ordered, count = sorted(values), len(values) - 1
    found = []
    for value in values:
        gone = bisect_left(ordered, value)
        middle = [ordered[place + (place >= gone)] for place in ((count - 1) // 2, count // 2)]
        found.append(sum(middle) / 2)
    return found


class StragglerWatch:
    """Looks at all beats from time to time, and has news when two looks agree: chance seldom strikes the same rank twice."""

    def __init__(
        self,
        folder: Path,
        lanes: int,
        world_size: int,
        since_s: float,
        keep: Callable[[Sequence[Beat]], None] = lambda _: None,
    ) -> None:
        self._keep = keep
        self._folder, self._lanes, self._size, self._since_s = folder, lanes, world_size, since_s
        self._seen: Straggler | None = None
        self._settled: Straggler | None = None
        self._told: Straggler | None = None

    def look(self) -> None:
        """Read the beats and judge; from any thread."""
        try:
            beats = read_beats(self._folder, self._size, self._since_s)
        except OSError:  # a disk that fails harms no training
            return
        self._keep(beats)
        found = find_straggler(beats, self._lanes, self._size)
        if _key(found) == _key(self._seen):
            self._settled = found
        self._seen = found

    def news(self) -> tuple[Straggler | None, Straggler | None] | None:
        """Return what is found now and what was said before, if they are not the same."""
        found, told = self._settled, self._told
        if _key(found) == _key(told):
            return None
        self._told = found
        return found, told


def _key(found: Straggler | None) -> tuple[int, str, str, int] | None:
    return None if found is None else found.key
