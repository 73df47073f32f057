"""The bytes that ranks really send for one bucket are those that docs/contract.md states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.scale.batch import share
from paceline.scale.tree import whole_subtrees
from paceline.train.gradients.bucket_exchange import AllGatherExchange, TreeShape
from paceline.train.gradients.exchange_choice import choose_exchange
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


def count_sent(world: World, lanes: int, size: int) -> tuple[str, int]:
    """Send one bucket of float32 through the exchange that is chosen for it; return its kind and the bytes sent."""
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

    total = torch.empty(size // 4)
    subtrees = whole_subtrees(share(lanes, world.rank, world.size), lanes)
    sums = [torch.full_like(total, len(lanes_of)) for lanes_of in subtrees]
    way = choose_exchange(total, 0, TreeShape.of(lanes, world), torch.device("cpu"))
    ProcessGroup._allgather_base = counting_gather
    dist.all_to_all_single = counting_scatter
    try:
        way.start(sums, [])
        while not way.advance(total):
            pass
    finally:
        ProcessGroup._allgather_base, dist.all_to_all_single = gather, scatter
    assert torch.all(total == lanes)
    return "all-gather" if isinstance(way, AllGatherExchange) else "all-to-all and all-gather", sent


def test_the_page_states_both_exchanges() -> None:
    assert {kind for _, _, _, kind, _, _ in stated()} == {"all-gather", "all-to-all and all-gather"}


@pytest.mark.parametrize("row", stated(), ids=lambda row: "-".join(map(str, row[:3])))
def test_ranks_send_as_many_bytes_as_the_page_states(row, tmp_path) -> None:
    ranks, lanes, size, kind, stated_sent, stated_ring = row
    counted = run_on_processes(
        count_sent, ranks, tmp_path, {"batch.lanes": lanes}, {"lanes": lanes, "size": size}
    )
    subtrees = [len(whole_subtrees(share(lanes, rank, ranks), lanes)) for rank in range(ranks)]
    assert {name for name, _ in counted} == {kind}
    for rank, (_, sent) in enumerate(counted):
        if kind == "all-gather":
            assert sent == (ranks - 1) * max(subtrees) * size
        else:
            assert sent == (subtrees[rank] + 1) * (ranks - 1) * size // ranks
    assert max(sent for _, sent in counted) / size == pytest.approx(stated_sent, abs=0.005)
    assert 2 * (ranks - 1) / ranks == pytest.approx(stated_ring, abs=0.005)
