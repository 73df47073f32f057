"""Where the wall time of a run went, and why it restarted: below its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plot.markup import NOTHING, Html, joined, tag
from paceline.report.page.step_times import bar
from paceline.units import human_time

_PARTS = {
    "useful_s": "useful steps",
    "repeated_s": "steps that were repeated later",
    "other_s": "start, evaluation, checkpoints",
    "down_s": "down until the restart",
}
_GOODPUT = (
    "Goodput is the time spent in useful steps divided by the wall time. A step is useful if no restart repeated it. The wall time "
    "is the time from the first start until the last event, without pauses after a requested stop."
)
_RESTARTS = 6


def wall_time(run: Mapping[str, Any]) -> Html:
    """Return the wall time as a bar, with the definition of goodput."""
    spent = run["goodput"]
    if not spent:
        return NOTHING
    shares, texts = {}, []
    for name, words in _PARTS.items():
        share = spent[name] / spent["wall_s"]
        if spent[name] > 0:
            shares[name] = share
            texts.append(f"{words}  {human_time(spent[name])}, {share:.0%}")
    about = tag("details", tag("summary", "What is goodput?"), tag("p", _GOODPUT))
    return joined(tag("div", bar("", shares, texts, explained=True), class_="wall"), about)


def restart_list(run: Mapping[str, Any]) -> Html:
    """Return the cause of every restart; of many, the newest."""
    restarts = run["restarts_because"]
    lines = []
    for number, restart in list(enumerate(restarts, 1))[-_RESTARTS:]:
        down = f"{human_time(restart['down_s'])} down, " if restart["down_s"] else ""
        where = f"{down}resumed from step {restart['from_step']:,}"
        lost = f", {restart['lost_steps']:,} steps repeated" if restart["lost_steps"] else ""
        title = tag("b", f"Restart {number}: ")
        lines.append(tag("li", title, f"{restart['cause']}; {where}{lost}"))
    earlier = len(restarts) - len(lines)
    if earlier:
        lines.insert(0, tag("li", f"{earlier:,} earlier restarts: see the time line"))
    return tag("ul", *lines, class_="restarts") if lines else NOTHING
