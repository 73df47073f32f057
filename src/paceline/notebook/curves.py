"""The curves of a run below a cell: the loss and the metrics, as SVG and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.plot.line import LIGHT, Curve, Line
from paceline.plot.svg_file import Plot, to_svg
from paceline.plot.text import text_curve
from paceline.report.find_run import NamedRun
from paceline.rundir import RunDir

_TEXT_WIDTH = 40
_MOST_LINES = len(LIGHT) - 1  # without the grey one


def curves_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the drawings of a run by MIME type, the loss first; none for a run without steps."""
    if not RunDir(folder).events.is_file():
        return
    from paceline.report.page.page_data import report_data  # imports NumPy

    (run,) = report_data([NamedRun(RunDir(folder), ())])["runs"]
    metrics = dict(run["metric_curves"])
    losses = {"training": run["curves"].get("loss"), "evaluation": metrics.pop("eval_loss", None)}
    name = f"{run['name']}, step {run['step']:,} of {run['total_steps']:,}"
    for title, curves in ((f"loss of {name}", losses), (f"metrics of {name}", metrics)):
        if lines := _lines(curves):
            plot = Plot(title, "step", "", lines, log_x=False, paper=True)
            yield {"image/svg+xml": to_svg(plot), "text/plain": _as_text(title, lines)}


def _lines(curves: Mapping[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for name, curve in curves.items():
        drawn = Curve(**curve) if curve else None
        if drawn and any(value is not None for value in drawn.mean):
            lines.append(Line(name, len(lines), drawn))
    return lines[:_MOST_LINES]


def _as_text(title: str, lines: Sequence[Line]) -> str:
    """Return one row per line.

    >>> print(_as_text("loss", [Line("training", 0, Curve.of([1, 2, 3], [4.0, 2.0, 1.0]))]))
    loss
    training  █▃▁  4 to 1
    """
    rows = [title]
    for line in lines:
        values = [value for value in line.curve.mean if value is not None]
        (curve,) = text_curve(values, _TEXT_WIDTH)
        rows.append(f"{line.name}  {curve}  {values[0]:.4g} to {values[-1]:.4g}")
    return "\n".join(rows)
