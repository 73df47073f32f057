"""What all curves of a report share: the choice of the x axis, smoothing, and the marks of restarts and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.plot.markup import NOTHING, Html, joined, radio_buttons, tag
from paceline.plot.page import key
from paceline.plot.shapes import Mark

_AXES = ("step", "time", "samples")
_MARKS = 500  # of each kind and run


def marks_of(run: Mapping[str, Any]) -> list[Mark]:
    """Return the restarts and checkpoints of a run."""
    if not run["starts"]:
        return []
    begun_s = run["starts"][0]["time_s"]
    kinds: list[tuple[Literal["restart", "checkpoint"], str, str]] = [
        ("restart", "restarts_because", "from_step"),
        ("checkpoint", "checkpoints", "step"),
    ]
    marks = []
    for kind, part, step in kinds:
        for event in run[part][-_MARKS:]:
            time_s = (event["time_s"] or begun_s) - begun_s
            marks.append(Mark(kind, event[step], round(time_s, 3), run["color"]))
    return marks


def curve_controls(marks: Sequence[Mark]) -> Html:
    """Return the switches, which the script shows, and the legend of the marks."""
    axis = radio_buttons("axis", _AXES, "x axis")
    slider = tag("input", type="range", id="smooth", min=0, max=0.99, step=0.01, value=0)
    shown = tag("output", "0", for_="smooth")
    switches = tag(
        "div", tag("span", "x axis"), axis, tag("label", "smoothing", for_="smooth"), slider, shown,
        class_="switches", hidden="",
    )  # fmt: skip
    kinds = dict.fromkeys(mark.kind for mark in marks)
    keys = joined(*(key(f"{kind}-mark", kind) for kind in kinds))
    legend = tag("span", keys, class_="legend") if keys else NOTHING
    return tag("div", switches, legend, class_="controls")
