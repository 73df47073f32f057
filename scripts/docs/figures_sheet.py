"""The figure of the cheat sheet: what every collective does to the data of three ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from canvas import MARGIN, WIDTH, Canvas

RANKS = range(3)
CELL, ROW, GAP = 28, 30, 36
PANEL_WIDE, PANEL_HIGH = (WIDTH - 2 * MARGIN + 24) / 3, 166
LETTERS = "abc"
Cells = Callable[[int], list[tuple[str, str]]]


@dataclass(frozen=True)
class Collective:
    """One panel: a collective, what each rank holds before and after it, and who uses it."""

    name: str
    call: str
    before: Cells
    after: Cells
    use: str


def _own(rank: int) -> list[tuple[str, str]]:
    return [_data(rank, rank)]


def _parts(rank: int) -> list[tuple[str, str]]:
    return [(f"pale r{rank}", f"{letter}{rank}") for letter in LETTERS]


def _all(_: int) -> list[tuple[str, str]]:
    return [_data(rank, rank) for rank in RANKS]


def _sum(_: int) -> list[tuple[str, str]]:
    return [("full hot", "Σ")]


def _data(rank: int, letter: int) -> tuple[str, str]:
    return f"pale r{rank}", LETTERS[letter]


def _only_0(cells: Cells) -> Cells:
    """Return what rank 0 holds; the others hold nothing of interest."""
    return lambda rank: cells(rank) if rank == 0 else [("open dim", "")] * len(cells(rank))


COLLECTIVES = (
    Collective("broadcast", "broadcast(x, src=0)", _only_0(_own), lambda _: [_data(0, 0)], "first weights of DDP"),
    Collective("scatter", "scatter(x, list, src=0)", _only_0(lambda _: [_data(0, part) for part in RANKS]), lambda rank: [_data(0, rank)], "hand out work"),
    Collective("gather", "gather(x, list, dst=0)", _own, _only_0(_all), "results to rank 0"),
    Collective("reduce", "reduce(x, dst=0)", _own, _only_0(_sum), "a metric on rank 0"),
    Collective("all-reduce", "all_reduce(x)", _own, _sum, "gradients of DDP"),
    Collective("all-gather", "all_gather(list, x)", _own, _all, "weights of FSDP"),
    Collective("reduce-scatter", "reduce_scatter(x, list)", _parts, lambda rank: [("full hot", f"Σ{LETTERS[rank]}")], "gradients of FSDP"),
    Collective("all-to-all", "all_to_all_single(y, x)", _parts, lambda rank: [(f"pale r{other}", f"{LETTERS[rank]}{other}") for other in RANKS], "mixture of experts"),
)  # fmt: skip


def collectives() -> Canvas:
    """Draw the data of three ranks before and after each collective."""
    alt = "What each collective does to the data of three ranks: broadcast, scatter, gather, reduce, all-reduce, all-gather, reduce-scatter, all-to-all, barrier."
    canvas = Canvas(
        "Collectives",
        "One row is one rank, before and after. Every rank must call it; Σ is the sum over the ranks.",
        86 + 3 * PANEL_HIGH + 6,
        alt,
    )
    for number, one in enumerate(COLLECTIVES):
        _panel(canvas, one, *_place(number))
    _barrier(canvas, *_place(len(COLLECTIVES)))
    return canvas


def _place(number: int) -> tuple[float, float]:
    """Return the left edge and the top of a panel."""
    return MARGIN - 12 + number % 3 * PANEL_WIDE, 86 + number // 3 * PANEL_HIGH


def _panel(canvas: Canvas, one: Collective, left: float, top: float) -> None:
    middle = left + PANEL_WIDE / 2
    canvas.text(middle, top + 16, one.name, "name r0")
    wide = [len(one.before(0)) * CELL, len(one.after(0)) * CELL]
    begin = middle - (sum(wide) + GAP) / 2
    end = begin + wide[0] + GAP
    for rank in RANKS:
        y = top + 26 + rank * ROW
        canvas.row(begin, y, CELL, CELL - 2, one.before(rank))
        canvas.row(end, y, CELL, CELL - 2, one.after(rank))
    y = top + 26 + 1.5 * ROW
    canvas.arrow([(end - GAP + 5, y), (end - 4, y)], "dim")
    canvas.text(middle, top + 132, one.call, "mono")
    canvas.text(middle, top + 149, one.use, "soft small")


def _barrier(canvas: Canvas, left: float, top: float) -> None:
    """Draw ranks that arrive at different times and leave together."""
    middle = left + PANEL_WIDE / 2
    canvas.text(middle, top + 16, "barrier", "name r0")
    canvas.path([(middle + 30, top + 24), (middle + 30, top + 28 + 3 * ROW)], "dash hot")
    for rank, length in zip(RANKS, (104, 62, 88), strict=True):
        y = top + 26 + (rank + 0.5) * ROW - 1
        canvas.path([(middle - 84, y), (middle - 84 + length, y)], f"line r{rank}")
        canvas.path([(middle - 84 + length, y), (middle + 30, y)], "dash dim")
        canvas.arrow([(middle + 30, y), (middle + 84, y)], f"r{rank}")
    canvas.text(middle, top + 132, "barrier()", "mono")
    canvas.text(middle, top + 149, "no data: all wait for the last", "soft small")
