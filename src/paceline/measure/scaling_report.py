"""A scaling study as a table on a terminal, and as the report that computing centres require."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paceline.measure.efficiency import GOOD, Scaling, Size
from paceline.plot.line import Curve, Line
from paceline.plot.svg_file import Plot, to_svg
from paceline.terminal import say, table
from paceline.units import human_size, short_time

_ENOUGH = 3
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.25rem .7rem;text-align:right;"
    "border-bottom:1px solid #94a3b866}svg{max-width:100%;height:auto}"
)
HEAD = (
    "ranks",
    "step",
    "spread",
    "samples/s",
    "speed-up",
    "efficiency",
    "spread",
    "data",
    "exposed",
    "uneven",
)


_DROPPABLE = ("spread", "spread", "uneven", "data", "exposed", "step")


class Part(NamedTuple):
    """A part of the report."""

    kind: str
    """heading, text, list, table or plot."""
    lines: Sequence[str]
    rows: Sequence[Sequence[str]] = ()


def print_study(scaling: Scaling) -> None:
    """Print the study as a table; a narrow terminal shows fewer columns."""
    say(f"{scaling.script}, {scaling.kind} scaling: {_work(scaling)}; {_how_often(scaling)}")
    rows = [row_of(size) for size in scaling.sizes]
    table(HEAD, rows, droppable=_DROPPABLE, numeric=HEAD)
    for line in remarks(scaling):
        say(line)


def row_of(size: Size) -> list[str]:
    """Return the cells of one world size."""
    return [
        str(size.ranks),
        short_time(size.step_s),
        f"{short_time(size.fastest_s)} to {short_time(size.slowest_s)}",
        f"{size.samples_per_s:,.0f}",
        f"{size.speedup:.2f}",
        f"{size.efficiency:.0%}",
        f"{size.efficiency_low:.0%} to {size.efficiency_high:.0%}",
        f"{size.data_share:.0%}",
        _share(size.exposed_share, "~" if size.exposed_how == "estimate" else ""),
        _share(size.uneven_share),
    ]


def _share(share: float | None, mark: str = "") -> str:
    return "?" if share is None else f"{mark}{share:.0%}"


def remarks(scaling: Scaling) -> list[str]:
    """Return the conclusions and warnings that belong to the table."""
    good = scaling.largest_good
    largest = "none"
    if good:
        largest = f"{good.ranks} rank{'s' if good.ranks > 1 else ''} ({good.efficiency:.0%})"
    lines = [f"largest size at {GOOD:.0%} efficiency or more: {largest}"]
    shared = [size.shares for size in scaling.sizes if size.shares]
    lines += [f"{shares}: the limit is the machine, not the program" for shares in shared]
    if len(scaling.sizes) < _ENOUGH:
        count = len(scaling.sizes)
        lines.append(f"computing centres require at least {_ENOUGH} sizes; this study has {count}")
    if any(size.exposed_how == "estimate" for size in scaling.sizes):
        lines.append("~: estimated from how much longer the end of a step takes than on one rank")
    return lines


def _work(scaling: Scaling) -> str:
    first = scaling.sizes[0]
    if scaling.kind == "strong":
        return f"{first.global_batch:,} samples per step in {first.lanes} lanes at every size"
    each = first.global_batch / first.ranks
    return f"{each:,.6g} samples per step and rank, so a step grows with the ranks"


def _how_often(scaling: Scaling) -> str:
    times = f"{scaling.rounds} round{'s' if scaling.rounds > 1 else ''}"
    return f"{times} of {scaling.steps} steps after {scaling.warmup_steps} warm-up steps; medians"


def plot_of(scaling: Scaling) -> str:
    """Return speed-up by ranks as SVG, with the ideal and the required efficiency."""
    ranks = [float(size.ranks) for size in scaling.sizes]
    ideal = [count / ranks[0] for count in ranks]
    measured = Curve.of(ranks, (size.speedup for size in scaling.sizes))
    required = Curve.of(ranks, (GOOD * value for value in ideal))
    lines = [
        Line("measured", 0, measured),
        Line("ideal", 7, Curve.of(ranks, ideal), dashed=True),
        Line(f"{GOOD:.0%} efficiency", 6, required, dashed=True),
    ]
    return to_svg(Plot(f"{scaling.script}: {scaling.kind} scaling", "ranks", "speed-up", lines))


def parts_of(studies: Sequence[Scaling]) -> list[Part]:
    """Return the report: code, machine, and the method, table, plot and result of each study."""
    newest = max(studies, key=lambda study: study.finished)
    parts = [Part("heading", [f"Scalability of {newest.name}"]), *_about(newest)]
    for study in studies:
        parts += [
            Part("heading", [f"{study.kind.capitalize()} scaling"]),
            Part("text", [method(study)]),
            Part("table", HEAD, [row_of(size) for size in study.sizes]),
            Part("plot", [study.kind, plot_of(study)]),
            Part("list", remarks(study)),
        ]
    return [*parts, Part("heading", ["Terms"]), Part("list", _TERMS)]


def _about(study: Scaling) -> list[Part]:
    facts = study.facts
    gpus = f"GPU: {facts['gpu']}" if facts["gpu"] else "GPU: none used"
    settings = ", ".join(
        f"{name}={str(facts[name]).lower()}"
        for name in ("parallel", "exact", "precision", "compile", "threads")
    )
    code = [
        f"Program: {study.script} {' '.join(study.words)}".strip(),
        f"Paceline {facts['paceline']}, torch {facts['torch']}, Python {facts['python']}",
        f"Settings: {settings}; backend: {facts['backend'] or 'none'}",
    ]
    machine = [
        f"Host: {facts['host']} ({facts['system']}), nodes used: {facts['nodes']}",
        f"Processor: {facts['cpu']}, cores available to a rank: {facts['cores']}, memory: {human_size(facts['memory_bytes'])}",
        gpus,
    ]
    return [
        Part("heading", ["Code"]),
        Part("list", code),
        Part("heading", ["Machine"]),
        Part("list", machine),
    ]


def method(study: Scaling) -> str:
    """Return how a study was measured."""
    work = _work(study)
    return (
        f"{work[0].upper()}{work[1:]}. Every size ran {study.rounds} times, one size after the other, in reverse in every other round. "
        f"In each run, {study.steps} steps were timed after {study.warmup_steps} warm-up steps, without evaluation, checkpoints and start. "
        "A step lasts as long as on its slowest rank. Step times are medians over rounds of medians over steps; "
        f"the spread is over rounds. Finished {study.finished}."
    )


_TERMS = (
    "Speed-up: samples per second divided by those of the smallest size.",
    "Efficiency: p1 T1 / (pn Tn), with p ranks and time T for the same work; in weak scaling T1 / Tn of a step.",
    f"Computing centres require an efficiency of {GOOD:.0%}.",
    "Data: share of the step time in which ranks wait for samples.",
    "Exposed: share in which they wait for communication that computation does not hide. Uneven: the part of it in which they wait for a slower rank.",
)


def to_markdown(studies: Sequence[Scaling]) -> str:
    """Return the report as Markdown; the plots are files beside it."""
    return "\n\n".join(_as_markdown(part) for part in parts_of(studies)) + "\n"


def _as_markdown(part: Part) -> str:
    if part.kind == "heading":
        return f"## {_plain(part.lines[0])}"
    if part.kind == "list":
        return "\n".join(f"- {_plain(line)}" for line in part.lines)
    if part.kind == "plot":
        return f"![{part.lines[0]} scaling](scaling-{part.lines[0]}.svg)"
    if part.kind == "table":
        rows = [part.lines, ["---:"] * len(part.lines), *part.rows]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return _plain(part.lines[0])


def _plain(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    return "".join(
        f"\\{letter}" if letter in r"\`*_[]<>#|" else letter for letter in " ".join(text.split())
    )


def to_html(studies: Sequence[Scaling]) -> str:
    """Return the report as one self-contained HTML page."""
    body = "\n".join(_as_html(part) for part in parts_of(studies))
    title = escape(f"Scalability of {studies[0].name}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'


def _as_html(part: Part) -> str:
    if part.kind == "heading":
        return f"<h2>{escape(part.lines[0])}</h2>"
    if part.kind == "list":
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in part.lines) + "</ul>"
    if part.kind == "plot":
        return part.lines[1]
    if part.kind == "table":
        head = "".join(f"<th>{escape(word)}</th>" for word in part.lines)
        rows = ("".join(f"<td>{escape(word)}</td>" for word in row) for row in part.rows)
        return f"<table><tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
    return f"<p>{escape(part.lines[0])}</p>"
