"""Which rank was slow, and when? A map of ranks over steps, and of ranks over phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paceline.report.page.markup import Html, joined, tag
from paceline.report.page.plot import SIZE, Charts, axis_label
from paceline.report.page.steptime import usual
from paceline.report.page.ticks import label
from paceline.telemetry.phases import PHASES, WAIT
from paceline.telemetry.rank_times import RankSample, downsample, read_samples
from paceline.units import short_time

_COLUMNS, _ROWS = 96, 64  # of a map at most
_LEVELS = 12
_LABELS = 6
_PHASE_ROWS = 16
_SENTENCES = 5


def rank_times_of(path: Path) -> dict[str, Any] | None:
    """Return each rank's own time at some steps; of very many ranks, the worst of each group of neighbours."""
    looks = downsample(read_samples(path), _COLUMNS)
    size = max((len(look.own_s) for look in looks), default=0)
    if size < 2:
        return None
    group = -(-size // _ROWS)
    first = list(range(0, size, group))
    return {
        "steps": [look.step for look in looks],
        "ranks": first,
        "own_s": [[_worst(look, rank, group) for look in looks] for rank in first],
    }


def _worst(look: RankSample, first: int, group: int) -> float | None:
    return max(
        (value for value in look.own_s[first : first + group] if value is not None), default=None
    )


def rank_maps(run: Mapping[str, Any], charts: Charts, *, several: bool) -> Html:
    """Return what is known of the ranks of a run, if there are several."""
    ranks = run["ranks"]
    if len(ranks) < 2 and not run["rank_times"]:
        return Html("")
    head = tag(
        "figcaption", tag("h3", "Ranks"), tag("span", run["name"] if several else "", class_="unit")
    )
    told = [
        f"step {event['step']:,}: {event['sentence']}" for event in run["slow_ranks"][-_SENTENCES:]
    ]
    now = _slowest(run) or "by their newest word no rank stands out"
    notes = [tag("p", line, class_="note") for line in told or [now]]
    return tag(
        "figure", head, _over_steps(run, charts), _over_phases(ranks), *notes, class_="chart wide"
    )


def _slowest(run: Mapping[str, Any]) -> str:
    slow = run["slowest"]
    if not slow:
        return ""
    beat = slow["beat"]
    return f"rank {beat['rank']} on {beat['node']} takes {slow['times']} times as long as the others for its own part"


def _over_steps(run: Mapping[str, Any], charts: Charts) -> Html:
    """Return ranks over steps: the redder, the longer a rank took for its own work."""
    found = run["rank_times"]
    if not found:
        return Html("")
    known = [value for row in found["own_s"] for value in row if value is not None]
    middle = usual(known)
    group = found["ranks"][1] - found["ranks"][0] if len(found["ranks"]) > 1 else 1
    words = f"own work a step, over steps: pale at the median of {short_time(middle)}, full from twice that on"
    words += f"; each row is the worst of {group} ranks" if group > 1 else ""
    number = charts.keep(
        {"steps": found["steps"], "ranks": found["ranks"], "own_s": found["own_s"]}
    )
    picture = tag(
        "svg", *_cells(found["own_s"], middle),
        viewBox=f"0 0 {SIZE} {SIZE}", preserveAspectRatio="none", role="img", aria_label="own work of ranks over steps",
    )  # fmt: skip
    area = tag(
        "div", picture, *_beside(found["ranks"]), *_below(found["steps"]),
        class_="area map", data_map=number, style=f"height:{max(56, min(320, 22 * len(found['ranks'])))}px",
    )  # fmt: skip
    return joined(tag("p", words, class_="small"), tag("div", area, class_="plot"))


def _cells(rows: Sequence[Sequence[float | None]], middle: float) -> list[Html]:
    """Return one path a shade: all cells in it."""
    shades: dict[int, list[str]] = {}
    height = SIZE / len(rows)
    for place, row in enumerate(rows):
        width, top = SIZE / len(row), place * height
        for column, value in enumerate(row):
            if value is not None:
                shade = round(_LEVELS * max(0.0, min(1.0, value / middle - 1)))
                shades.setdefault(shade, []).append(
                    f"M{column * width:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
                )
    return [
        tag("path", class_="shade", d="".join(cells), style=f"--v:{strength(shade / _LEVELS)}")
        for shade, cells in sorted(shades.items())
    ]


def strength(share: float) -> str:
    """Return how strong the colour of a cell is, from 0 to 1: never none, so that a cell is seen.

    >>> strength(0), strength(0.5), strength(7)
    ('0.08', '0.54', '1.00')
    """
    return f"{0.08 + 0.92 * max(0.0, min(1.0, share)):.2f}"


def _beside(ranks: Sequence[int]) -> list[Html]:
    every = -(-len(ranks) // _LABELS)
    return [
        axis_label(
            "y",
            SIZE * (place + 0.5) / len(ranks),
            f"rank {ranks[place]}" if place == 0 else str(ranks[place]),
        )
        for place in range(0, len(ranks), every)
    ]


def _below(steps: Sequence[int]) -> list[Html]:
    every = -(-len(steps) // _LABELS)
    places = range(every // 2, len(steps), every)
    return [
        axis_label("x", SIZE * (place + 0.5) / len(steps), label(steps[place])) for place in places
    ]


def _over_phases(ranks: Sequence[Mapping[str, Any]]) -> Html:
    """Return what each rank spends its time on: a cell is the redder, the longer it takes there than the others."""
    if len(ranks) < 2:
        return Html("")
    shown = sorted(
        sorted(ranks, key=lambda rank: -rank["own_s"])[:_PHASE_ROWS],
        key=lambda rank: int(rank["rank"]),
    )
    middles = {phase: median(_spent(rank, phase) for rank in ranks) for phase in PHASES}
    own = usual([rank["own_s"] for rank in ranks])
    rows = [
        tag(
            "tr", tag("th", f"rank {rank['rank']}"), tag("td", rank["node"]),
            *(_cell(_spent(rank, phase), (_spent(rank, phase) - middles[phase]) / own) for phase in PHASES),
            _cell(_spent(rank, WAIT), 0.0), _cell(rank["own_s"], rank["own_s"] / own - 1),
        )
        for rank in shown
    ]  # fmt: skip
    heads = ["", "node", *PHASES, "waits for others", "own work"]
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", word) for word in heads))),
        tag("tbody", *rows),
        class_="phases",
    )
    words = "what a step of late was spent on, mean over steps"
    words += (
        f"; of {len(ranks):,} ranks, the {_PHASE_ROWS} slowest" if len(ranks) > _PHASE_ROWS else ""
    )
    return joined(tag("p", words, class_="small"), tag("div", table, class_="scroll"))


def _spent(rank: Mapping[str, Any], phase: str) -> float:
    """Return what a phase took; of a rank that tells no phases, what it does tell."""
    if not rank["phases"]:
        return float(
            {"data": rank["data_s"], "forward": rank["own_s"] - rank["data_s"]}.get(phase, 0.0)
        )
    found = rank["phases"].get(phase)
    return float(found["mean_s"] or 0.0) if found else 0.0


def _cell(seconds: float, share: float) -> Html:
    return tag(
        "td", tag("span", short_time(seconds)), class_="n shade", style=f"--v:{strength(share)}"
    )
