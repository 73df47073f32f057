"""How a study of scaling is told: as a table on a terminal, and as the report that computing centres ask for."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paceline.measure.efficiency import GOOD, Scaling, Size
from paceline.plot.line import Curve, Line
from paceline.plot.svg_file import Plot, to_svg
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


class Part(NamedTuple):
    """A piece of the report."""

    kind: str
    """heading, text, list, table or plot."""
    lines: Sequence[str]
    rows: Sequence[Sequence[str]] = ()


def describe(scaling: Scaling) -> str:
    """Return the study as a table for a terminal."""
    rows = [HEAD, *(row_of(size) for size in scaling.sizes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    table = [
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in rows
    ]
    head = f"{scaling.script}, {scaling.kind} scaling: {_work(scaling)}; {_how_often(scaling)}"
    return "\n".join([head, *table, *remarks(scaling)])


def row_of(size: Size) -> list[str]:
    """Return the cells of one size."""
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
    """Return what has to be said beside the table."""
    good = scaling.largest_good
    said = [f"largest size at {GOOD:.0%} efficiency or more: {good.ranks if good else 'none'}"]
    if good:
        said[0] += f" rank{'s' if good.ranks > 1 else ''} ({good.efficiency:.0%})"
    said += [
        f"{size.shares}: that shows the machine's limit, not the program's"
        for size in scaling.sizes
        if size.shares
    ]
    if len(scaling.sizes) < _ENOUGH:
        said.append(
            f"computing centres ask for at least {_ENOUGH} sizes; here are {len(scaling.sizes)}"
        )
    if any(size.exposed_how == "estimate" for size in scaling.sizes):
        said.append("~: estimated, from how much longer a step ends than on one rank")
    return said


def _work(scaling: Scaling) -> str:
    first = scaling.sizes[0]
    if scaling.kind == "strong":
        return f"{first.global_batch:,} samples a step in {first.lanes} lanes at every size"
    each = first.global_batch / first.ranks
    return f"{each:,.6g} samples a step and rank, so a step grows with the ranks"


def _how_often(scaling: Scaling) -> str:
    times = f"{scaling.rounds} round{'s' if scaling.rounds > 1 else ''}"
    return f"{times} of {scaling.steps} steps after {scaling.warmup_steps} to warm up; medians"


def plot_of(scaling: Scaling) -> str:
    """Return speed-up over ranks, beside what would be ideal and what is asked for, as SVG."""
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
    """Return the report: code, machine, and for each study its method, table, plot and result."""
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
        f"Settings: {settings}; messages by {facts['backend'] or 'nobody'}",
    ]
    machine = [
        f"Host: {facts['host']} ({facts['system']}), nodes used: {facts['nodes']}",
        f"Processor: {facts['cpu']}, cores a rank may use: {facts['cores']}, memory: {human_size(facts['memory_bytes'])}",
        gpus,
    ]
    return [
        Part("heading", ["Code"]),
        Part("list", code),
        Part("heading", ["Machine"]),
        Part("list", machine),
    ]


def method(study: Scaling) -> str:
    """Return how a study was made."""
    return (
        f"{_work(study)[0].upper()}{_work(study)[1:]}. Every size ran {study.rounds} times, the sizes in turn, every other round backwards. "
        f"Of each run, {study.steps} steps were timed after {study.warmup_steps} to warm up; evaluation, saving and starting are not in them. "
        f"The time of a step is that of its slowest rank, the figure is the median over rounds of the median over steps, and the "
        f"spread is that of the rounds. Finished {study.finished}."
    )


_TERMS = (
    "Speed-up: samples per second over those of the smallest size.",
    "Efficiency: p1 T1 / (pn Tn), with p ranks and T the time of the same work; in weak scaling T1 / Tn of one step.",
    f"Computing centres ask for an efficiency of {GOOD:.0%}.",
    "Data: share of the time in steps in which ranks wait for samples.",
    "Exposed: share in which they wait for messages that computing does not hide, uneven: the part of it in which a slower rank is waited for.",
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
    """Return a text of which Markdown makes nothing else: names come from outside."""
    return "".join(
        f"\\{letter}" if letter in r"\`*_[]<>#|" else letter for letter in " ".join(text.split())
    )


def to_html(studies: Sequence[Scaling]) -> str:
    """Return the report as one HTML page that needs nothing else."""
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
