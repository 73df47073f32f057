"""A sum over several nodes has the bits of one rank, and sends fewer messages and bytes between nodes than a flat one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from paceline.exact import exchange
from paceline.exact.exchange import (
    AllGatherExchange,
    AllToAllExchange,
    Exchange,
    TreeShape,
    TwoLevelExchange,
    choose_exchange,
    two_levels,
)
from paceline.world.node_groups import NodeGroups
from paceline.world.world import World
from support.lane_sums import lane_values, sums_of_rank, tree_sum
from support.loops import fit
from support.processes import run_on_processes
from support.simulated_ranks import (
    Link,
    Wires,
    everyone,
    groups_of,
    shape_of,
    simulated_wires,
    totals,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"
CPU = torch.device("cpu")
PLACES = [(2, 2), (2, 3), (3, 2), (4, 3)]
"""Nodes, and ranks of each."""


def summed_in_two_levels(
    values: list[torch.Tensor], nodes: int, per_node: int
) -> tuple[list[torch.Tensor], Link]:
    """Return the total on every rank, and what a node sends to others at most."""

    def exchange(wires: Wires, rank: int, shape: TreeShape) -> Exchange:
        return two_levels(values[0], shape, CPU, groups_of(wires, rank, nodes, per_node))

    return summed(values, nodes, per_node, exchange)


def summed_flat(values: list[torch.Tensor], nodes: int, per_node: int) -> Link:
    """Return what a node sends to others at most in one all-to-all and all-gather of all ranks."""

    def exchange(wires: Wires, rank: int, shape: TreeShape) -> Exchange:
        return AllToAllExchange(values[0], shape, CPU, everyone(wires, rank, nodes * per_node))

    return summed(values, nodes, per_node, exchange)[1]


def summed(
    values: list[torch.Tensor],
    nodes: int,
    per_node: int,
    exchange: Callable[[Wires, int, TreeShape], Exchange],
) -> tuple[list[torch.Tensor], Link]:
    ranks, lanes = range(nodes * per_node), len(values)
    with simulated_wires() as wires:
        made = [exchange(wires, rank, shape_of(lanes, rank, len(ranks))) for rank in ranks]
        sums = [sums_of_rank(values, rank, len(ranks)) for rank in ranks]
        return totals(made, sums), wires.between_nodes(per_node)


@pytest.mark.parametrize("small", [0, 1 << 18], ids=["slices", "gathered"])
@pytest.mark.parametrize(("nodes", "per_node"), PLACES)
def test_every_rank_has_the_bits_of_the_tree(nodes, per_node, small, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "_SMALL_SLICES_BYTES", small)
    ranks = nodes * per_node
    for lanes in (ranks, ranks + 1, 2 * ranks - 1, 30):
        for size, dtype in ((1, torch.float64), (97, torch.float32)):
            values = lane_values(lanes, size, dtype)
            expected = tree_sum(values, range(lanes))
            found, _ = summed_in_two_levels(values, nodes, per_node)
            assert all(torch.equal(total, expected) for total in found), (lanes, size, dtype)


@pytest.mark.parametrize(("nodes", "per_node"), PLACES)
def test_a_node_never_sends_more_messages_or_bytes_than_flat(nodes, per_node, monkeypatch) -> None:
    monkeypatch.setattr(exchange, "_SMALL_SLICES_BYTES", 0)
    ranks = nodes * per_node
    for lanes in (ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 30):
        values = lane_values(lanes, 12 * ranks, torch.float32)
        _, two = summed_in_two_levels(values, nodes, per_node)
        flat = summed_flat(values, nodes, per_node)
        assert two.messages < flat.messages, lanes
        assert two.size_bytes < flat.size_bytes, lanes


def test_small_buckets_and_other_nodes_stay_flat(monkeypatch) -> None:
    world, made = World(size=4, local_size=2, nodes=2), []

    def groups(of: World) -> NodeGroups | None:
        made.append(of)
        return groups_of(Wires(), 0, 2, 2) if of.nodes == 2 else None

    monkeypatch.setattr(exchange, "node_groups", groups)
    small, large = torch.empty(1 << 16), torch.empty((1 << 16) + 1)
    shape, uneven = TreeShape.of(4, world), TreeShape.of(4, replace(world, nodes=3))
    assert isinstance(choose_exchange(small, 5, shape, CPU), AllGatherExchange)
    assert not made, "a run with small buckets makes no process groups"
    assert isinstance(choose_exchange(large, 5, shape, CPU), TwoLevelExchange)
    assert isinstance(choose_exchange(large, 0, uneven, CPU), AllToAllExchange)


def stated() -> list[tuple[int, int, str, int, float]]:
    """Return the table of docs/contract.md: nodes, ranks per node, exchange, messages, and bytes sent per byte."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+) x (\d+) \| (flat|two levels) \| (\d+) \| ([\d.]+) B \|$", text, re.MULTILINE
    )
    rows = [(int(row[0]), int(row[1]), row[2], int(row[3]), float(row[4])) for row in rows]
    return [row for row in rows if row[0] * row[1] <= 16]  # more are too many to simulate


@pytest.mark.parametrize("row", stated(), ids=lambda row: "-".join(map(str, row[:3])))
def test_the_page_states_what_a_node_sends(row, monkeypatch) -> None:
    nodes, per_node, kind, messages, sent = row
    monkeypatch.setattr(exchange, "_SMALL_SLICES_BYTES", 0)
    values = lane_values(nodes * per_node, 3 * nodes * per_node, torch.float32)
    if kind == "flat":
        counted = summed_flat(values, nodes, per_node)
    else:
        _, counted = summed_in_two_levels(values, nodes, per_node)
    assert counted.messages == messages
    assert counted.size_bytes / values[0].nbytes == pytest.approx(sent, abs=0.005)


def trained(config, world: World, *, per_node: int) -> tuple[str, bool]:
    """Train as a rank of an emulated node: the digest, and whether two levels were used."""
    node, local_rank = divmod(world.rank, per_node)
    nodes = world.size // per_node
    world = replace(world, node=node, nodes=nodes, local_rank=local_rank, local_size=per_node)
    exchange._FLAT_BYTES = exchange._SMALL_SLICES_BYTES = 64
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(21, 8, generator=generator), torch.randn(21, 1, generator=generator)
    start = TwoLevelExchange.start
    with patch.object(TwoLevelExchange, "start", autospec=True, side_effect=start) as started:
        return fit(world, config, model, data, optimizer=adamw).digest, started.called


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize(
    "words",
    [
        {},
        pytest.param({"device": "cuda", "capture": "false"}, marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "capture": "true"}, marks=pytest.mark.gpu),
    ],
)
def test_a_model_learns_the_same_bits_on_two_nodes_as_on_one_rank(words, tmp_path) -> None:
    settings = {"batch.lanes": 5, "batch.global_size": 20, "clip_norm": 0.5, "epochs": 2, **words}
    if words:
        settings |= {"backend": "nccl", "epochs": 4}
    [(alone, _)] = run_on_processes(trained, 1, tmp_path, settings, {"per_node": 1})
    found = run_on_processes(trained, 4, tmp_path, settings, {"per_node": 2})
    assert found == [(alone, True)] * 4
