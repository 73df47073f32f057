"""Draw the lanes of a step on 1, 2 and 4 ranks, and the one tree that adds them, as an SVG.

The lanes of each rank and the additions come from the code that trains.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.scale.batch import share
from paceline.scale.tree import children

LANES = 8
WORLDS = (1, 2, 4)
WIDTH, MARGIN, LANE, GAP = 680, 42, 62, 14
TOP, PANEL, FOOT = 92, 232, 84
ROW = 36  # from one level of the tree to the next
STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
text { font: 15px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.title { font-size: 19px; font-weight: 600 }
.left { text-anchor: start }
.soft { fill: #57606a }
.lane { fill: #ffffff; stroke-width: 1.5 }
.edge { fill: none; stroke-width: 2.5 }
.plus { fill: none; stroke: #ffffff; stroke-width: 2 }
.r0 { --c: #00796b } .r1 { --c: #1565c0 } .r2 { --c: #7b1fa2 } .r3 { --c: #6d7600 } .between { --c: #d84315 }
.rank { fill: var(--c); fill-opacity: .13 }
.lane, .edge { stroke: var(--c) }
.node { fill: var(--c) }
.name { fill: var(--c); font-weight: 600 }
@media (prefers-color-scheme: dark) {
.card { fill: #1b1f27; stroke: #3d444d }
text { fill: #e6edf3 }
.soft { fill: #9da7b3 }
.lane { fill: #1b1f27 }
.plus { stroke: #1b1f27 }
.r0 { --c: #4db6ac } .r1 { --c: #64b5f6 } .r2 { --c: #ce93d8 } .r3 { --c: #c5cf4a } .between { --c: #ff8a65 }
.name { fill: var(--c) }
}
"""


def draw() -> str:
    """Return the SVG."""
    height = TOP + len(WORLDS) * PANEL + FOOT
    alt = "A step of eight lanes on one, two and four ranks: each time the same tree adds the same lanes in the same order."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{alt}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="12"/>',
        label(WIDTH / 2, 40, f"One step is always {LANES} lanes, added along one tree", "title"),
        label(WIDTH / 2, 66, "The number of ranks decides only which rank runs a lane.", "soft"),
        *(part for row, ranks in enumerate(WORLDS) for part in panel(ranks, TOP + row * PANEL)),
        *legend(TOP + len(WORLDS) * PANEL + 22),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def panel(ranks: int, top: float) -> Iterator[str]:
    """Yield the lanes of a step on this number of ranks, and the tree below them."""
    for rank in range(ranks):
        mine = share(LANES, rank, ranks)
        left, right = middle(mine.start) - LANE / 2 - 5, middle(mine.stop - 1) + LANE / 2 + 5
        shape = f'x="{left}" y="{top}" width="{right - left}" height="68" rx="8"'
        yield f'<rect class="rank r{rank}" {shape}/>'
        yield label((left + right) / 2, top + 20, f"rank {rank}", f"name r{rank}")
        for lane in mine:
            place = (
                f'x="{middle(lane) - LANE / 2}" y="{top + 30}" width="{LANE}" height="30" rx="5"'
            )
            yield f'<rect class="lane r{rank}" {place}/>'
            yield label(middle(lane), top + 50, f"lane {lane}")
    yield from tree(range(LANES), ranks, top + 60)
    yield label(
        middle_of(range(LANES)) + 18,
        top + 60 + 3 * ROW + 26,
        "the gradient of the step",
        "left soft",
    )


def tree(node: range, ranks: int, top: float) -> Iterator[str]:
    """Yield the additions below a node, then its own, in the colour of the rank that makes them."""
    if len(node) == 1:
        return
    owner = next(
        (f"r{rank}" for rank in range(ranks) if set(node) <= set(share(LANES, rank, ranks))),
        "between",
    )
    x, y = middle_of(node), top + level(node) * ROW
    for half in children(node):
        yield from tree(half, ranks, top)
        begin = top + level(half) * ROW + (10 if level(half) else 0)
        yield f'<path class="edge {owner}" d="M{middle_of(half)} {begin}V{y}H{x}"/>'
    if len(node) == LANES:
        yield f'<path class="edge {owner}" d="M{x} {y}v28"/>'
    yield plus(x, y, owner)


def legend(top: float) -> Iterator[str]:
    """Yield the explanation of the colours."""
    own = [f"r{rank}" for rank in range(max(WORLDS))]
    for row, (owners, meaning) in enumerate(
        [(own, "a rank adds its own lanes"), (["between"], "sums of different ranks are added")]
    ):
        x, y = MARGIN + 6, top + row * 28
        for owner in owners:
            yield plus(x, y, owner)
            x += 26
        yield label(x, y + 5, meaning, "left")


def plus(x: float, y: float, owner: str) -> str:
    """Return the symbol of an addition."""
    sign = f'<path class="plus" d="M{x - 5} {y}h10M{x} {y - 5}v10"/>'
    return f'<circle class="node {owner}" cx="{x}" cy="{y}" r="10"/>{sign}'


def level(node: range) -> int:
    """Return the height of a node in the tree."""
    return (len(node) - 1).bit_length()


def middle(lane: int) -> float:
    """Return the x of the middle of a lane."""
    return MARGIN + LANE / 2 + lane * (LANE + GAP)


def middle_of(node: range) -> float:
    """Return the x of the middle of a node's lanes."""
    return (middle(node.start) + middle(node.stop - 1)) / 2


def label(x: float, y: float, text: str, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}"' + (f' class="{kind}"' if kind else "") + f">{text}</text>"
