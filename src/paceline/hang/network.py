"""Hangs that the network explains: a partition between nodes, or a link that moves no data."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.collectives import pending_of
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import (
    HangVerdict,
    format_ranks,
    other_ranks,
    plural,
    rank_numbers,
    with_nodes,
)

NodePair = tuple[str, str]


def find_partition(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the node, or the pair of nodes, whose TCP packets the other side does not acknowledge."""
    pairs = _unanswered(reports)
    if not pairs:
        return None
    nodes = {report.node for report in reports}
    isolated = {node for node in nodes if all(node in pair for pair in pairs)}
    if len(nodes) > 2 and len(isolated) == 1:
        return _isolated_node(reports, isolated.pop(), pairs)
    sender, receiver = pairs[0]
    ends = [report for report in reports if report.node in {sender, receiver}]
    sentence = (
        f"network partition between {sender} and {receiver}: "
        f"{sender} gets no answer from {receiver}"
    )
    return HangVerdict("link", rank_numbers(ends), other_ranks(reports, ends), sentence)


def _isolated_node(
    reports: Sequence[RankReport], node: str, pairs: Sequence[NodePair]
) -> HangVerdict:
    on_node = [report for report in reports if report.node == node]
    peers = {left if right == node else right for left, right in pairs}
    sentence = (
        f"network partition: {with_nodes(on_node)} {plural(on_node, 'is', 'are')} cut off from "
        f"{' and '.join(sorted(peers))}"
    )
    return HangVerdict("link", rank_numbers(on_node), other_ranks(reports, on_node), sentence)


def _unanswered(reports: Sequence[RankReport]) -> list[NodePair]:
    """Return (sender, silent receiver) by node; an address that no rank claims is shown as is."""
    owner: dict[str, str] = {}
    for report in reports:
        owner |= dict.fromkeys(report.links.addresses, report.node)
    pairs: set[NodePair] = set()
    for report in reports:
        for address in report.links.unanswered:
            pairs.add((report.node, owner.get(address, address)))
    return sorted(pairs)


def find_stalled_link(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return that every rank has entered a collective, and one does not complete."""
    pending = {report.rank: entry for report in reports if (entry := pending_of(report))}
    if len(pending) < len(reports):
        return None
    first = min(pending.values(), key=lambda entry: entry.number)
    behind = [report for report in reports if pending[report.rank].number == first.number]
    is_one_group = len({entry.group for entry in pending.values()}) == 1
    if is_one_group and len(behind) < len(reports):
        ahead = other_ranks(reports, behind)
        sentence = (
            f"{with_nodes(behind)} {plural(behind, 'is', 'are')} still in {first.label}, which "
            f"{format_ranks(ahead)} {plural(ahead, 'has', 'have')} completed: "
            f"no data reaches {plural(behind, 'it', 'them')} over the network"
        )
        return HangVerdict("link", rank_numbers(behind), ahead, sentence)
    nodes = sorted({report.node for report in reports})
    between = " and ".join(nodes) if len(nodes) > 1 else "them"
    sentence = (
        f"all ranks are in {first.label} and it does not complete: "
        f"no data moves over the network between {between}"
    )
    return HangVerdict("link", rank_numbers(reports), (), sentence)
