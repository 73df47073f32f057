"""What does an exchange in two levels save between nodes? `node_links.py [--links 100mbit:1,:0] [--worlds 2x2,4x4] [--width 512]`.

Hosts in network namespaces, N x G: N hosts with G ranks each. Every round takes one step with a flat exchange and one
in two levels, of the same gradients; their sums must have the same bits. Beside the bytes that the interfaces of the hosts have
counted stand those of simulated ranks, which also count the messages: pieces of an all-to-all, and pieces passed on around the ring of
an all-gather. Rates alone are set by tc (tbf), with delays by a relay in user space. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from paceline.config import RunConfig
from paceline.config.values import with_settings
from paceline.exact.buckets import BucketedSum, make_buckets
from paceline.exact.exchange import Exchange, choose_exchange, two_levels
from paceline.exact.row import Layout, Rows
from paceline.telemetry.phases import PhaseClock
from paceline.world.process_group import join, wait_for_all
from paceline.world.world import World
from support.lane_sums import sums_of_rank
from support.private_cluster import PrivateCluster, private_cluster, wanted
from support.simulated_ranks import Link, everyone, groups_of, shape_of, simulated_wires, totals

PACELINE = str(Path(sys.executable).with_name("paceline"))
WORLDS = "2x1,2x2,2x4,2x8,3x2,3x4,4x2,4x4"
LINKS = "100mbit:1,:0"
LANES = 16
LAYERS = 4
WAYS = ("flat", "two levels")
NUMBERS_OF_A_NOTE = 8
_ASKED, _FOUND = "NODE_LINKS_ASKED", "node_links_found"
_PATIENCE_S = 500.0


@dataclass(frozen=True)
class Found:
    """What was seen of one way in one world."""

    seconds: list[float]
    """Of each step, on rank 0."""
    sent: float
    """Bytes per step that the busiest host has sent to others."""


def model(width: int) -> nn.Sequential:
    """Return the model, with the same weights on every rank; of 4 MiB in two buckets with a width of 512."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def sent_bytes() -> int:
    """Return how many bytes the interface between hosts has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("this host has no eth0")


def stepper(world: World, width: int) -> Callable[[], list[Tensor]]:
    """Return a step: all lanes of this rank forward and backward, and the sum over all ranks."""
    net, clock = model(width), PhaseClock()
    summed = BucketedSum(list(net.parameters()), LANES, world, clock, exact=True)
    generator = torch.Generator().manual_seed(world.rank)
    each = LANES // world.size + (world.rank < LANES % world.size)
    lanes = [torch.randn(2, width, generator=generator) for _ in range(each)]

    def step() -> list[Tensor]:
        summed.begin()
        rows = Rows(Layout.of({"loss": 0.0}), each, torch.device("cpu"))
        for number, samples in enumerate(lanes, 1):
            summed.before_lane(rows, last=number == each)
            net(samples).square().mean().backward()
            if number < each:
                summed.after_lane()
        summed.finish()
        return [value.grad for value in net.parameters() if value.grad is not None]

    return step


def measure_here(rounds: int, width: int) -> None:
    """Take steps in both ways, in turn, as one rank; the first rank of each host writes what it has seen."""
    config = with_settings(RunConfig(), {"batch.lanes": LANES, "batch.global_size": 2 * LANES})
    with join(config) as world:
        made = (stepper(replace(world, nodes=1), width), stepper(world, width))
        steps = dict(zip(WAYS, made, strict=True))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        sent = dict.fromkeys(WAYS, 0)
        for number in range(rounds + 1):
            sums = {}
            for way, step in steps.items():
                wait_for_all(world)
                before, begun = sent_bytes(), time.perf_counter()
                sums[way] = step()
                taken = time.perf_counter() - begun
                wait_for_all(world)
                if number:  # the first round connects
                    seconds[way].append(taken)
                    sent[way] += sent_bytes() - before
            flat, two = sums.values()
            assert all(map(torch.equal, flat, two)), "the bits differ"
        if world.local_rank == 0:
            found = {way: [seconds[way], sent[way] / rounds] for way in WAYS}
            Path(f"{_FOUND}-{world.node}").write_text(json.dumps(found))


def measure(hosts: PrivateCluster, nodes: int, per_node: int, asked: str) -> dict[str, Found]:
    """Measure one world on hosts that are up; asked: rounds and width."""

    def on(node: int) -> None:
        where = ["--nodes", str(nodes), "--node", str(node), "--rendezvous", "n1:29400"]
        words = [PACELINE, "run", "-n", str(per_node), *where, __file__]
        env = {_ASKED: asked}
        done = hosts.run(words, f"n{node + 1}", timeout_s=_PATIENCE_S, env=env)
        assert done.code == 0, done.out + done.err

    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(on, range(nodes)))
    files = [hosts.work / f"{_FOUND}-{node}" for node in range(nodes)]
    seen = [json.loads(file.read_text()) for file in files]
    return {way: Found(seen[0][way][0], max(host[way][1] for host in seen)) for way in WAYS}


def simulated(nodes: int, per_node: int, way: str, width: int) -> Link:
    """Return what the busiest host sends per step, by simulated ranks; without notes that are sent alone."""
    parameters = list(model(width).parameters())
    ranks, total, cpu = nodes * per_node, Link(), torch.device("cpu")
    buckets = make_buckets(parameters)
    for numbers in buckets:
        note = NUMBERS_OF_A_NOTE if numbers is buckets[-1] else 0
        like = torch.zeros(sum(parameters[number].numel() for number in numbers))
        with simulated_wires() as wires:
            exchanges: list[Exchange] = []
            for rank in range(ranks):
                shape, among = shape_of(LANES, rank, ranks), everyone(wires, rank, ranks)
                groups = groups_of(wires, rank, nodes, per_node)
                if way == "flat" or per_node == 1:
                    exchanges.append(choose_exchange(like, note, shape, cpu, among))
                else:
                    exchanges.append(two_levels(like, shape, cpu, groups))
            sums = [sums_of_rank([like] * LANES, rank, ranks) for rank in range(ranks)]
            totals(exchanges, sums, note)
            sent = wires.between_nodes(per_node)
        total.messages += sent.messages
        total.size_bytes += sent.size_bytes
    return total


def row(link: str, world: str, way: str, found: Found, counted: Link) -> str:
    """Return a row of the table."""
    times = f"{statistics.median(found.seconds):.3f} ({min(found.seconds):.3f} to {max(found.seconds):.3f})"
    cells = [link, world, way, str(counted.messages), f"{counted.size_bytes / 1e6:.2f}"]
    return f"| {' | '.join([*cells, f'{found.sent / 1e6:.2f}', times])} |"


def main() -> int:
    """Measure all worlds on all links, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=LINKS, help="RATE:DELAY_MS, with commas between")
    parser.add_argument("--worlds", default=WORLDS, help="NODESxRANKS, with commas between")
    parser.add_argument("--width", type=int, default=512, help="of the four layers of the model")
    parser.add_argument("--rounds", type=int, default=5)
    known = parser.parse_args()
    print("| link | hosts x ranks | exchange | messages | MB computed | MB counted | s per step |")
    print("|---|---|---|---|---|---|---|")
    for link in known.links.split(","):
        rate, delay_ms = link.split(":")
        for world in known.worlds.split(","):
            nodes, per_node = map(int, world.split("x"))
            options: dict[str, Any] = {"rate": rate, "delay_ms": float(delay_ms)}
            with private_cluster(wanted(nodes=nodes, slurm=False, **options)) as hosts:
                found = measure(hosts, nodes, per_node, f"{known.rounds} {known.width}")
            for way in WAYS:
                counted = simulated(nodes, per_node, way, known.width)
                print(row(link, world, way, found[way], counted), flush=True)
    return 0


if __name__ == "__main__":
    if _ASKED in os.environ:
        measure_here(*map(int, os.environ[_ASKED].split()))
    else:
        sys.exit(main())
