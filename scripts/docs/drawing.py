"""Draw the lanes of a step on 1, 2 and 4 ranks, and the one tree that adds them, as an SVG.

The lanes of each rank and the additions come from the code that trains.
"""

from __future__ import annotations

from canvas import WIDTH, Canvas

from paceline.scale.batch import share
from paceline.scale.tree import children

LANES = 8
WORLDS = (1, 2, 4)
LANE, GAP = 62, 14
LEFT = (WIDTH - LANES * (LANE + GAP) + GAP) / 2
TOP, PANEL, FOOT = 92, 232, 84
ROW = 36  # from one level of the tree to the next


def draw() -> str:
    """Return the SVG."""
    canvas = Canvas(
        f"One step is always {LANES} lanes, added along one tree",
        "The number of ranks decides only which rank runs a lane.",
        TOP + len(WORLDS) * PANEL + FOOT,
        "A step of eight lanes on one, two and four ranks: each time the same tree adds the same lanes in the same order.",
    )
    for number, ranks in enumerate(WORLDS):
        panel(canvas, ranks, TOP + number * PANEL)
    legend(canvas, TOP + len(WORLDS) * PANEL + 22)
    return canvas.svg()


def panel(canvas: Canvas, ranks: int, top: float) -> None:
    """Draw the lanes of a step on this number of ranks, and the tree below them."""
    for rank in range(ranks):
        mine = share(LANES, rank, ranks)
        left, right = middle(mine.start) - LANE / 2 - 5, middle(mine.stop - 1) + LANE / 2 + 5
        canvas.box(left, top, right - left, 68, f"tint r{rank}")
        canvas.text((left + right) / 2, top + 20, f"rank {rank}", f"name r{rank}")
        for lane in mine:
            canvas.box(middle(lane) - LANE / 2, top + 30, LANE, 30, f"blank r{rank}")
            canvas.text(middle(lane), top + 50, f"lane {lane}")
    tree(canvas, range(LANES), ranks, top + 60)
    bottom = top + 60 + 3 * ROW + 26
    canvas.text(middle_of(range(LANES)) + 18, bottom, "the gradient of the step", "left soft")


def tree(canvas: Canvas, node: range, ranks: int, top: float) -> None:
    """Draw the additions below a node, then its own, in the colour of the rank that makes them."""
    if len(node) == 1:
        return
    owner = next(
        (f"r{rank}" for rank in range(ranks) if set(node) <= set(share(LANES, rank, ranks))),
        "hot",
    )
    x, y = middle_of(node), top + level(node) * ROW
    for half in children(node):
        tree(canvas, half, ranks, top)
        begin = top + level(half) * ROW + (10 if level(half) else 0)
        canvas.path([(middle_of(half), begin), (middle_of(half), y), (x, y)], f"line {owner}")
    if len(node) == LANES:
        canvas.path([(x, y), (x, y + 28)], f"line {owner}")
    canvas.plus(x, y, owner)


def legend(canvas: Canvas, top: float) -> None:
    """Draw the explanation of the colours."""
    own = [f"r{rank}" for rank in range(max(WORLDS))]
    for row, (owners, meaning) in enumerate(
        [(own, "a rank adds its own lanes"), (["hot"], "sums of different ranks are added")]
    ):
        x, y = LEFT + 6, top + row * 28
        for owner in owners:
            canvas.plus(x, y, owner)
            x += 26
        canvas.text(x, y + 5, meaning, "left")


def level(node: range) -> int:
    """Return the height of a node in the tree."""
    return (len(node) - 1).bit_length()


def middle(lane: int) -> float:
    """Return the x of the middle of a lane."""
    return LEFT + LANE / 2 + lane * (LANE + GAP)


def middle_of(node: range) -> float:
    """Return the x of the middle of a node's lanes."""
    return (middle(node.start) + middle(node.stop - 1)) / 2
