"""Which link carries nothing, or which node is cut off, by what the kernels of the others had to send again."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.phrasing import are, named, ranks_but
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import HangVerdict

Pair = tuple[str, str]


def which_link_is_cut(records: Sequence[RankReport]) -> HangVerdict | None:
    """Return the node that others hear nothing of, or the two that do not hear each other."""
    pairs = _unanswered(records)
    if not pairs:
        return None
    nodes = {record.node for record in records}
    lonely = {node for node in nodes if all(node in pair for pair in pairs)}
    if len(nodes) > 2 and len(lonely) == 1:
        return _of_node(records, lonely.pop(), pairs)
    one, other = pairs[0]
    ends = [record for record in records if record.node in {one, other}]
    words = f"the link between {one} and {other} carries nothing: {one} gets no answer from {other}"
    return HangVerdict(
        "link", tuple(record.rank for record in ends), ranks_but(records, ends), words
    )


def _of_node(records: Sequence[RankReport], node: str, pairs: Sequence[Pair]) -> HangVerdict:
    mine = [record for record in records if record.node == node]
    others = sorted({one if other == node else other for one, other in pairs})
    words = f"{named(mine)} {are(mine)} cut off: no answer comes over the link to {' and '.join(others)}"
    return HangVerdict(
        "link", tuple(record.rank for record in mine), ranks_but(records, mine), words
    )


def _unanswered(records: Sequence[RankReport]) -> list[Pair]:
    """Return who gets no answer from whom, by node; an address of which nobody says that it is his stands for itself."""
    owner = {address: record.node for record in records for address in record.links.addresses}
    found = {
        (record.node, owner.get(address, address))
        for record in records
        for address in record.links.unanswered
    }
    return sorted(found)
