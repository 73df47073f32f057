"""What does exactness cost where the step does real work?

`python benchmarks/exact_cost.py` trains the network of the mnist recipe (dropout on, AdamW, the embedded digits, global
batch 64, one thread a rank) on two ranks, three ways: Paceline with exact=true, with exact=false, and a hand-written
DistributedDataParallel loop with as many micro-batches a rank. All live in the same two processes and take turns, one
epoch each, in rotated order, so that whatever else the machine does hits all alike; ratios are taken within a round.

CPU is summed over both ranks; the wall clock is rank 0's, from barrier to barrier. Paceline's side is its own pieces
(parallelize, Batches, OptimizerStep); what its Trainer adds around a step is measured by toy_loop.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from ratios import ratios, rotated, spread, table
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.config import BatchConfig
from paceline.recipes.digits import embedded_digits
from paceline.recipes.mnist import MnistConfig, Net, build_optimizer

RANKS, BATCH = 2, 64

Turn = Callable[[], object]
"""One epoch of a contender; the next call is the next epoch."""

Readings = dict[str, list[tuple[float, float]]]
"""CPU and wall seconds of each contender's turns."""


def paceline_turn(config: MnistConfig, world: paceline.World) -> Turn:
    """Return turns of Paceline's own step."""
    model = paceline.parallelize(Net(), world, config)
    batches = paceline.Batches(embedded_digits()[0], config, world)
    optimizer = build_optimizer(model, config)
    take = paceline.OptimizerStep(
        world, model, optimizer, cross_entropy, config, batches.total_samples
    )
    steps = batches.steps()
    return lambda: [take(step) for step in islice(steps, batches.plan.steps_per_epoch)]


def hand_written_turn(config: MnistConfig, world: paceline.World) -> Turn:
    """Return turns of a loop of one's own: the last micro-batch of a rank sums across ranks, those before it do not."""
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, config)
    digits = embedded_digits()[0]
    generator = torch.Generator().manual_seed(0)
    each = config.batch.lanes // world.size

    def turn() -> None:
        for micro_batches in shuffled(digits, config.batch.lanes, world, generator):
            optimizer.zero_grad()
            for number, (images, labels) in enumerate(micro_batches, start=1):
                with model.no_sync() if number < each else nullcontext():
                    (cross_entropy(model(images), labels) / each).backward()
            optimizer.step()

    return turn


def shuffled(
    digits: tuple[Tensor, Tensor], lanes: int, world: paceline.World, generator: torch.Generator
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's micro-batches of each step of one epoch."""
    images, labels = digits
    order = torch.randperm(len(labels), generator=generator)
    for batch in order.split(BATCH):
        mine = batch.tensor_split(lanes)[world.rank :: world.size]
        yield [(images[rows], labels[rows]) for rows in mine]


def timed(turn: Turn) -> tuple[float, float]:
    """Return CPU seconds over all ranks and wall seconds of one turn. Every rank must call this."""
    dist.barrier()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    turn()
    spent = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item(), time.perf_counter() - wall_s


def measure(lanes: int, rounds: int, world: paceline.World) -> Readings:
    """Let all contenders take turns; the first two rounds warm up. Every rank must call this."""
    warm_up = 2
    config = MnistConfig(epochs=rounds + warm_up, batch=BatchConfig(BATCH, lanes))
    free = MnistConfig(epochs=rounds + warm_up, batch=BatchConfig(BATCH, lanes), exact=False)
    turns = {
        "exact=true": paceline_turn(config, world),
        "exact=false": paceline_turn(free, world),
        "hand-written": hand_written_turn(config, world),
    }
    found: Readings = defaultdict(list)
    for number in range(rounds + warm_up):
        for name in rotated(list(turns), number):
            reading = timed(turns[name])
            if number >= warm_up:
                found[name].append(reading)
    return found


def report(found: Readings, steps: int) -> str:
    """Return times a step, and the ratios that matter."""
    rows = []
    for clock, title in enumerate(("CPU", "wall")):
        ms = {
            name: [reading[clock] * 1e3 / steps for reading in readings]
            for name, readings in found.items()
        }
        exact = ms["exact=true"]
        rows.append(
            [title, *(spread(ms[name], 1) for name in sorted(ms))]
            + [spread(ratios(exact, ms[name]), 3) for name in ("exact=false", "hand-written")]
        )
    return table(
        [
            "clock",
            *(f"{name}, ms/step" for name in sorted(found)),
            "exact / free",
            "exact / hand-written",
        ],
        rows,
    )


def be_a_rank(known: argparse.Namespace) -> None:
    """Measure each setting; rank 0 prints."""
    with paceline.join(MnistConfig()) as world:
        steps = -(-len(embedded_digits()[0][1]) // BATCH)
        for lanes in known.lanes:
            found = measure(lanes, known.rounds, world)
            if world.is_main:
                print(
                    f"\n{lanes} lanes on {RANKS} ranks, {known.rounds} rounds of {steps} steps each; median (min-max)\n"
                )
                print(report(found, steps), flush=True)


def main() -> None:
    """Start two ranks of this file, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds; each contender trains one epoch a round"
    )
    parser.add_argument(
        "--lanes", type=int, nargs="*", default=[2, 4], help="micro-batches a step, over both ranks"
    )
    known = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(known)
    else:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            f"-n{RANKS}",
            __file__,
            "--",
            *sys.argv[1:],
        ]
        sys.exit(
            subprocess.run(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
            ).returncode
        )


if __name__ == "__main__":
    main()
