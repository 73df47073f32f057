"""The bytes that ranks really send for one bucket are those that docs/contract.md states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.exact.exchange import AllGatherExchange, TreeShape, choose_exchange
from paceline.scale.batch import share
from paceline.scale.tree import whole_subtrees
from paceline.world.world import World
from support.processes import run_on_processes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def stated() -> list[tuple[int, int, int, str, float, float]]:
    """Return the table of the page: ranks, lanes, bytes of the bucket, exchange, and bytes sent per byte."""
    _, _, below = PAGE.read_text(encoding="utf-8").partition("| ranks n | lanes |")
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) (\w+) \| ([\w -]+) \| ([\d.]+) B \| ([\d.]+) B \|$",
        below.partition("\n\n")[0],
        re.MULTILINE,
    )
    return [
        (int(ranks), int(lanes), int(size) * UNITS[unit], kind, float(sent), float(ring))
        for ranks, lanes, size, unit, kind, sent, ring in rows
    ]


def count_sent(world: World, cases: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """Send buckets of float32 through the exchange that is chosen for each; return its kind and the bytes sent."""
    sent = 0
    gather, scatter = ProcessGroup._allgather_base, dist.all_to_all_single

    def counting_gather(group, received, mine, *rest):
        nonlocal sent
        sent += mine.nbytes * (world.size - 1)
        return gather(group, received, mine, *rest)

    def counting_scatter(received, mine, received_sizes, sent_sizes, **rest):
        nonlocal sent
        for rank, elements in enumerate(sent_sizes):
            sent += elements * mine.element_size() if rank != world.rank else 0
        return scatter(received, mine, received_sizes, sent_sizes, **rest)

    ProcessGroup._allgather_base = counting_gather
    dist.all_to_all_single = counting_scatter
    found = []
    for lanes, size in cases:
        sent, total = 0, torch.empty(size // 4)
        subtrees = whole_subtrees(share(lanes, world.rank, world.size), lanes)
        sums = [torch.full_like(total, len(lanes_of)) for lanes_of in subtrees]
        way = choose_exchange(total, 0, TreeShape.of(lanes, world), torch.device("cpu"))
        way.start(sums, [])
        while not way.advance(total):
            pass
        assert torch.all(total == lanes)
        gathers = isinstance(way, AllGatherExchange)
        found.append(("all-gather" if gathers else "all-to-all and all-gather", sent))
    return found


def test_the_page_states_both_exchanges() -> None:
    assert {row[3] for row in stated()} == {"all-gather", "all-to-all and all-gather"}
    assert {row[0] for row in stated()} == {2, 3, 4}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_send_as_many_bytes_as_the_page_states(ranks: int, tmp_path) -> None:
    rows = [row[1:] for row in stated() if row[0] == ranks]
    cases = [row[:2] for row in rows]
    counted = run_on_processes(count_sent, ranks, tmp_path, {}, {"cases": cases})
    for number, (lanes, size, kind, stated_sent, stated_ring) in enumerate(rows):
        subtrees = [len(whole_subtrees(share(lanes, rank, ranks), lanes)) for rank in range(ranks)]
        assert {found[number][0] for found in counted} == {kind}
        sent = [found[number][1] for found in counted]
        if kind == "all-gather":
            assert sent == [(ranks - 1) * max(subtrees) * size] * ranks
        else:
            assert sent == [(own + 1) * (ranks - 1) * size // ranks for own in subtrees]
        assert max(sent) / size == pytest.approx(stated_sent, abs=0.005)
        assert 2 * (ranks - 1) / ranks == pytest.approx(stated_ring, abs=0.005)
