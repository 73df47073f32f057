"""The order in which lanes are added: one fixed binary tree, the same on any ranks.

The tree over n lanes splits at the largest power of two below n. A node is the range of its
lanes.
"""

from __future__ import annotations

from collections.abc import Sequence


def children(node: range) -> tuple[range, range]:
    """Return the two halves of a node.

    >>> children(range(0, 6)), children(range(4, 6))
    ((range(0, 4), range(4, 6)), (range(4, 5), range(5, 6)))
    """
    half = 1 << (len(node) - 1).bit_length() - 1
    return range(node.start, node.start + half), range(node.start + half, node.stop)


def whole_subtrees(mine: range, lanes: int) -> list[range]:
    """Return the largest nodes whose lanes all belong to one rank, in lane order.

    >>> whole_subtrees(range(3, 6), 8)
    [range(3, 4), range(4, 6)]
    """
    return _within(range(lanes), mine)


def _within(node: range, mine: range) -> list[range]:
    if node.start >= mine.stop or node.stop <= mine.start:
        return []
    if mine.start <= node.start and node.stop <= mine.stop:
        return [node]
    left, right = children(node)
    return _within(left, mine) + _within(right, mine)


def merges_after(mine: range, lanes: int) -> list[int]:
    """Return, for each lane of a rank, how often to add the two newest sums once that lane is done.

    The sums of `whole_subtrees` remain at the end.

    >>> merges_after(range(0, 4), 4), merges_after(range(3, 6), 8)
    ([0, 1, 0, 2], [0, 0, 1])
    """
    counts = [0] * len(mine)
    pending = whole_subtrees(mine, lanes)
    while pending:
        node = pending.pop()
        if len(node) > 1:
            counts[node.stop - 1 - mine.start] += 1
            pending += children(node)
    return counts


def additions(nodes: Sequence[range], lanes: int) -> list[tuple[int, int]]:
    """Return the additions (to, from) that reduce all subtree sums to the total, in row 0.

    >>> additions([range(0, 2), range(2, 3), range(3, 4), range(4, 8)], 8)
    [(1, 2), (0, 1), (0, 3)]
    """
    steps, _ = additions_to(nodes, [range(lanes)])
    return steps


def additions_to(
    nodes: Sequence[range], wanted: Sequence[range]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the additions (to, from) that reduce subtree sums to those of some larger nodes, and the rows of these.

    >>> additions_to([range(1, 2), range(2, 3), range(3, 4)], whole_subtrees(range(1, 4), 8))
    ([(1, 2)], [0, 1])
    """
    rows = {node: row for row, node in enumerate(nodes)}
    steps: list[tuple[int, int]] = []

    def row_of(node: range) -> int:
        if node in rows:
            return rows[node]
        left, right = (row_of(child) for child in children(node))
        steps.append((left, right))
        return left

    results = [row_of(node) for node in wanted]
    return steps, results


def additions_by_turn(
    turns: Sequence[int], first: int = 0, lanes: int = 0
) -> list[list[tuple[int, int]]]:
    """Return the additions (to, from) that each turn makes possible.

    `turns` holds the turn in which each lane arrives. The sum of a node replaces its first lane, so the total ends up in lane 0. With only
    some of `lanes`, from `first` on, the sums of `whole_subtrees` remain.

    >>> additions_by_turn([0, 1, 0, 1])
    [[], [(0, 1), (2, 3), (0, 2)]]
    >>> additions_by_turn([0, 0, 1, 1])
    [[(0, 1)], [(2, 3), (0, 2)]]
    >>> additions_by_turn([0, 0, 1], first=3, lanes=8)
    [[], [(4, 5)]]
    """
    by_turn: list[list[tuple[int, int]]] = [[] for _ in range(max(turns) + 1)]

    def turn_of(node: range) -> int:
        if len(node) == 1:
            return turns[node.start - first]
        left, right = children(node)
        turn = max(turn_of(left), turn_of(right))
        by_turn[turn].append((left.start, right.start))
        return turn

    for node in whole_subtrees(range(first, first + len(turns)), lanes or len(turns)):
        turn_of(node)
    return by_turn
