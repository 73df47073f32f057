"""Which rank is slow, in which phase, always or once. Wall time cannot tell: all ranks wait for the slowest."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from paceline.safe_open import read_text
from paceline.scale.batch import share
from paceline.telemetry.heartbeat import NO_TIME, Beat
from paceline.telemetry.phases import PHASES, WAIT, PhaseTime
from paceline.units import short_time

CLEARLY = 1.2
"""From this ratio on, a rank is slower than the others, rather than unlucky."""

_WORTH = 0.05  # of a whole step, including waiting: a smaller delay is not worth reporting
_ONCE_STEPS = 3.0  # a single delay is reported if it is longer than this many steps
_ONCE_S = 0.1
_UNLIKE = 1.5  # the ratio between ranks with different numbers of lanes
_BY_LANE = {"data", "forward", "backward"}

Kind = Literal["chronic", "one-off"]

PHASE_NAMES = {
    "data": "waiting for samples",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer",
    "gc": "in garbage collection",
    "other": "between steps",
}


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    beat: Beat
    times: float
    """Its own time per step divided by the median of the others; for a one-off, the time of that step."""
    phase: str = "other"
    """The phase in which it is slow."""
    kind: Kind = "chronic"
    more_s: float = 0.0
    """Seconds that the phase takes longer than on the others: per step, or in the one step."""
    step: int = 0
    """For a one-off, the step."""

    @property
    def cost_s(self) -> float:
        """Seconds that the others waited for it in recent steps."""
        return self.more_s * (1 if self.kind == "one-off" else max(1, self.beat.steps))

    @property
    def key(self) -> tuple[int, str, str, int]:
        """Identity: two findings with one key are the same."""
        return self.beat.rank, self.phase, self.kind, self.step


def describe_straggler(slow: Straggler) -> str:
    """Return the sentence for the progress line and the report.

    >>> describe_straggler(Straggler(Beat(3, "n1", 9, 0.0, 0.2, 0.1), 2.0, "data", "chronic", 0.1))
    'rank 3 (n1) is slow: +100.0 ms per step waiting for samples (2.0 x the others)'
    >>> describe_straggler(Straggler(Beat(3, "n1", 9, 0.0, 0.2, 0.1), 9.0, "gc", "one-off", 1.5, step=8))
    'rank 3 (n1) was slow once, in step 8: +1.50 s in garbage collection'
    """
    rank = f"rank {slow.beat.rank} ({slow.beat.node})"
    phase = PHASE_NAMES.get(slow.phase, slow.phase)
    more = short_time(slow.more_s)
    if slow.kind == "one-off":
        return f"{rank} was slow once, in step {slow.step:,}: +{more} {phase}"
    return f"{rank} is slow: +{more} per step {phase} ({slow.times:.1f} x the others)"


def read_beats(folder: Path, world_size: int, since_s: float) -> list[Beat]:
    """Return the beats of a world since its start; leftover beats of an earlier one are ignored."""
    beats = [_read(path) for path in sorted(folder.glob("*.beat"))]
    return [beat for beat in beats if beat and beat.rank < world_size and beat.time_s >= since_s]


def _read(path: Path) -> Beat | None:
    damaged = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
    try:
        return Beat.parse(read_text(path))
    except (OSError, *damaged):
        return None


def find_straggler(beats: Sequence[Beat], lanes: int, world_size: int) -> Straggler | None:
    """Return the rank that costs the others most, of those clearly slower than ranks with as many lanes.

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
    chronic: list[Straggler] = []
    once: list[Straggler] = []
    for group, ratio in _comparable(beats, lanes, world_size):
        chronic += _chronic(group, ratio)
        once += _once(group)
    return max(chronic + once, key=lambda slow: slow.cost_s, default=None)


def _comparable(
    beats: Sequence[Beat], lanes: int, world_size: int
) -> Iterator[tuple[list[Beat], float]]:
    """Yield groups of ranks with as many lanes each, and the ratio from which one is slow.

    If a rank has no equal, all are compared by time per lane, which differs a little between few and many lanes.
    """
    by_lanes: dict[int, list[Beat]] = defaultdict(list)
    for beat in beats:
        by_lanes[len(share(lanes, beat.rank, world_size))].append(beat)
    alone = any(len(group) == 1 for group in by_lanes.values())
    if alone and len(beats) > 1:
        most = max(by_lanes)
        scaled: list[Beat] = []
        for own, group in by_lanes.items():
            scaled += [_scaled(beat, most / own) for beat in group]
        yield scaled, _UNLIKE
    else:
        yield from ((group, CLEARLY) for group in by_lanes.values() if len(group) > 1)


def _scaled(beat: Beat, times: float) -> Beat:
    """Return a beat as if the rank had `times` as many lanes."""
    if times == 1.0:
        return beat
    phases = dict(beat.phases)
    for name in _BY_LANE & set(phases):
        phase = phases[name]
        phases[name] = PhaseTime(
            phase.mean_s * times, phase.steady_s * times, phase.largest_s, phase.largest_step
        )
    return replace(beat, own_s=beat.own_s * times, data_s=beat.data_s * times, phases=phases)


def _chronic(group: Sequence[Beat], ratio: float) -> Iterator[Straggler]:
    """Yield the rank with the longest own work in most steps, if it is clearly longer and worth reporting."""
    steady = {beat.rank: _steady(beat) for beat in group}
    worst = max(group, key=lambda beat: sum(steady[beat.rank].values()))
    slow = steady[worst.rank]
    others = [steady[beat.rank] for beat in group if beat is not worst]
    more = {phase: slow[phase] - median(times[phase] for times in others) for phase in PHASES}
    phase = max(PHASES, key=lambda name: more[name])
    own, usual = sum(slow.values()), median(sum(times.values()) for times in others)
    times = round(own / max(usual, 1e-9), 2)
    whole = own + worst.phases.get(WAIT, NO_TIME).steady_s
    if times > ratio and own - usual > _WORTH * whole:
        yield Straggler(worst, times, phase, "chronic", more[phase])


def _steady(beat: Beat) -> Mapping[str, float]:
    """Return the time of each phase in most steps; estimated from the totals if the beat has no phases."""
    if beat.phases:
        return {phase: beat.phases.get(phase, NO_TIME).steady_s for phase in PHASES}
    times = dict.fromkeys(PHASES, 0.0)
    times["data"], times["forward"] = beat.data_s, beat.own_s - beat.data_s
    return times


def _once(group: Sequence[Beat]) -> Iterator[Straggler]:
    """Yield each phase of each rank that took far longer in one step than it ever did on the others."""
    usual_of_others = _medians_without([sum(_steady(beat).values()) for beat in group])
    for phase in PHASES:
        largest = [beat.phases.get(phase, NO_TIME).largest_s for beat in group]
        largest_of_others = _medians_without(largest)
        for index, beat in enumerate(group):
            usual = usual_of_others[index]
            more_s = largest[index] - largest_of_others[index]
            if more_s > max(_ONCE_STEPS * usual, _ONCE_S):
                times = round((usual + more_s) / max(usual, 1e-9), 2)
                step = beat.phases[phase].largest_step
                yield Straggler(beat, times, phase, "one-off", more_s, step)


def _medians_without(values: Sequence[float]) -> list[float]:
    """Return, for each of two or more values, the median of the others; sorts once, as there may be thousands.

    >>> _medians_without([3.0, 1.0, 2.0, 9.0]), _medians_without([1.0, 5.0]), _medians_without([2.0, 2.0, 8.0])
    ([2.0, 3.0, 3.0, 2.0], [5.0, 1.0], [5.0, 5.0, 2.0])
    """
    ordered, count = sorted(values), len(values) - 1
    lower, upper = (count - 1) // 2, count // 2
    medians = []
    for value in values:
        removed = bisect_left(ordered, value)
        left = ordered[lower + (lower >= removed)]
        right = ordered[upper + (upper >= removed)]
        medians.append((left + right) / 2)
    return medians


class StragglerWatch:
    """Reads all beats from time to time; a finding counts when two reads agree, because chance seldom repeats."""

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
        self._confirmed: Straggler | None = None
        self._announced: Straggler | None = None

    def look(self) -> None:
        """Read the beats and search for a straggler; from any thread."""
        try:
            beats = read_beats(self._folder, self._size, self._since_s)
        except OSError:  # a failing disk must not fail the training
            return
        self._keep(beats)
        straggler = find_straggler(beats, self._lanes, self._size)
        if _key(straggler) == _key(self._seen):
            self._confirmed = straggler
        self._seen = straggler

    def news(self) -> tuple[Straggler | None, Straggler | None] | None:
        """Return the current and the previously announced straggler, if they differ."""
        current, before = self._confirmed, self._announced
        if _key(current) == _key(before):
            return None
        self._announced = current
        return current, before


def _key(straggler: Straggler | None) -> tuple[int, str, str, int] | None:
    return None if straggler is None else straggler.key
