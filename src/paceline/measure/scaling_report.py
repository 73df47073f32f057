"""A scaling study as a table on a terminal, and as the report that computing centres require."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.measure.efficiency import GOOD, Scaling, Size
from paceline.plot.line import Curve, Line
from paceline.plot.svg_file import Plot, to_svg
from paceline.terminal import say, table
from paceline.units import human_size, short_time

_ENOUGH = 3
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


def result(scaling: Scaling) -> str:
    """Return the conclusion of a study."""
    good = scaling.largest_good
    largest = "none"
    if good:
        largest = f"{good.ranks} rank{'s' if good.ranks > 1 else ''} ({good.efficiency:.0%})"
    return f"largest size at {GOOD:.0%} efficiency or more: {largest}"


def warnings(scaling: Scaling) -> list[str]:
    """Return what makes a study less than computing centres ask for."""
    shared = [size.shares for size in scaling.sizes if size.shares]
    lines = [f"{shares}: the limit is the machine, not the program" for shares in shared]
    if len(scaling.sizes) < _ENOUGH:
        count = len(scaling.sizes)
        lines.append(f"computing centres require at least {_ENOUGH} sizes; this study has {count}")
    return lines


def remarks(scaling: Scaling) -> list[str]:
    """Return the conclusions and warnings that belong to the table."""
    lines = [result(scaling), *warnings(scaling)]
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


def speedup_lines(scaling: Scaling, color: int = 0) -> list[Line]:
    """Return speed-up by ranks with its spread over rounds, the ideal and the required efficiency."""
    ranks = [float(size.ranks) for size in scaling.sizes]
    ideal = [count / ranks[0] for count in ranks]
    measured = Curve(
        ranks,
        [size.speedup for size in scaling.sizes],
        [min(s.speedup, s.efficiency_low * x) for s, x in zip(scaling.sizes, ideal, strict=True)],
        [max(s.speedup, s.efficiency_high * x) for s, x in zip(scaling.sizes, ideal, strict=True)],
        0,
    )
    required = Curve.of(ranks, (GOOD * value for value in ideal))
    return [
        Line("measured", color, measured, error_bars=True),
        Line("ideal", 7, Curve.of(ranks, ideal), dashed=True),
        Line(f"{GOOD:.0%} efficiency", 6, required, dashed=True),
    ]


def plot_of(scaling: Scaling) -> str:
    """Return speed-up by ranks as SVG, both axes logarithmic."""
    title = f"{scaling.script}: {scaling.kind} scaling"
    return to_svg(Plot(title, "ranks", "speed-up", speedup_lines(scaling), log_y=True))


def parts_of(studies: Sequence[Scaling]) -> list[Part]:
    """Return the report: code, machine, and the method, table, plot and result of each study."""
    newest = max(studies, key=lambda study: study.finished)
    parts = [Part("heading", [f"Scalability of {newest.name}"])]
    for study in studies:
        parts += [Part("text", [f"Warning: {text}"]) for text in warnings(study)]
    for title, lines in about(newest).items():
        parts += [Part("heading", [title]), Part("list", lines)]
    for study in studies:
        parts += [
            Part("heading", [f"{study.kind.capitalize()} scaling"]),
            Part("text", [method(study)]),
            Part("table", HEAD, [row_of(size) for size in study.sizes]),
            Part("plot", [study.kind]),
            Part("list", remarks(study)),
        ]
    return [*parts, Part("heading", ["Terms"]), Part("list", TERMS)]


def about(study: Scaling) -> dict[str, list[str]]:
    """Return what was measured: code and machine, in lines."""
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
    return {"Code": code, "Machine": machine}


def method(study: Scaling) -> str:
    """Return how a study was measured."""
    work = _work(study)
    return (
        f"{work[0].upper()}{work[1:]}. Every size ran {study.rounds} times, one size after the other, in reverse in every other round. "
        f"In each run, {study.steps} steps were timed after {study.warmup_steps} warm-up steps, without evaluation, checkpoints and start. "
        "A step lasts as long as on its slowest rank. Step times are medians over rounds of medians over steps; "
        f"the spread is over rounds. Finished {study.finished}."
    )


TERMS = (
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
