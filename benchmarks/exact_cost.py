"""What does exactness cost where the step does real work?

`python benchmarks/exact_cost.py` trains the network of the mnist recipe (dropout on, AdamW, the embedded digits, global
batch 64, one thread per rank) on two ranks, three ways: a loop over `paceline.Run` with exact=true, the same with
exact=false, and a hand-written DistributedDataParallel loop with as many micro-batches per rank. Each round starts all
three in processes of their own, in rotated order; ratios are taken within a round. The first two epochs are left out.

CPU is summed over both ranks, including the threads of Paceline (heartbeat, watchdog); the wall clock is rank 0's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from ratios import ratios, rotated, spread, table
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.config import BatchConfig, CheckpointConfig
from paceline.recipes.digits import embedded_digits
from paceline.recipes.mnist import MnistConfig, Net, build_optimizer

RANKS, BATCH, WARM_UP_EPOCHS = 2, 64, 2
MARK = "SECONDS "

Clocks = list[tuple[float, float]]
"""CPU and wall seconds of this rank at the end of each epoch."""


def now() -> tuple[float, float]:
    """Return the CPU and wall seconds of this process."""
    return time.process_time(), time.perf_counter()


def settings(epochs: int, lanes: int, *, exact: bool = True) -> MnistConfig:
    """Return the settings of a training without saves."""
    saving = CheckpointConfig(every="end")
    batch = BatchConfig(BATCH, lanes)
    return MnistConfig(epochs=epochs, batch=batch, exact=exact, checkpoint=saving)


def train_with_run(config: MnistConfig) -> Clocks:
    """Train in a loop over `paceline.Run`."""
    clocks = []
    with paceline.Run(config) as run:
        model = run.model(Net())
        optimizer = run.optimizer(build_optimizer(model, config))

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            images, labels = batch
            return cross_entropy(model(images), labels)

        for step in run.steps(embedded_digits()[0]):
            run.update(optimizer, loss, step)
            if step.ends_epoch:
                clocks.append(now())
        return summed(clocks)


def train_by_hand(config: MnistConfig) -> Clocks:
    """Train with DDP: the last micro-batch of a rank sums across ranks, those before it do not."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, config)
    generator = torch.Generator().manual_seed(0)
    each = config.batch.lanes // RANKS
    clocks = []
    for _ in range(config.epochs):
        for micro_batches in shuffled(config.batch.lanes, generator):
            optimizer.zero_grad()
            for number, (images, labels) in enumerate(micro_batches, start=1):
                with model.no_sync() if number < each else nullcontext():
                    (cross_entropy(model(images), labels) / each).backward()
            optimizer.step()
        clocks.append(now())
    clocks = summed(clocks)
    dist.destroy_process_group()
    return clocks


def shuffled(lanes: int, generator: torch.Generator) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's micro-batches of each step of one epoch."""
    images, labels = embedded_digits()[0]
    order = torch.randperm(len(labels), generator=generator)
    for batch in order.split(BATCH):
        mine = batch.tensor_split(lanes)[dist.get_rank() :: RANKS]
        yield [(images[rows], labels[rows]) for rows in mine]


def summed(clocks: Clocks) -> Clocks:
    """Return the CPU seconds of both ranks together, and the wall seconds of this one. Every rank must call this."""
    cpu_s = torch.tensor([cpu for cpu, _ in clocks], dtype=torch.float64)
    dist.all_reduce(cpu_s)
    return [(cpu, wall) for cpu, (_, wall) in zip(cpu_s.tolist(), clocks, strict=True)]


CONTENDERS: dict[str, Callable[[int, int], Clocks]] = {
    "exact=true": lambda epochs, lanes: train_with_run(settings(epochs, lanes)),
    "exact=false": lambda epochs, lanes: train_with_run(settings(epochs, lanes, exact=False)),
    "hand-written": lambda epochs, lanes: train_by_hand(settings(epochs, lanes)),
}


def be_a_rank(known: argparse.Namespace) -> None:
    """Train one contender; rank 0 prints the seconds of the epochs that count."""
    torch.set_num_threads(1)
    clocks = CONTENDERS[known.contender](known.epochs + WARM_UP_EPOCHS, known.lanes[0])
    if os.environ["RANK"] == "0":
        begin, end = clocks[WARM_UP_EPOCHS - 1], clocks[-1]
        spent = [last - first for first, last in zip(begin, end, strict=True)]
        print(MARK + json.dumps(spent), flush=True)


def measure(name: str, lanes: int, epochs: int) -> list[float]:
    """Start two ranks of a contender; return the CPU and wall seconds of its epochs."""
    command = [sys.executable, "-m", "paceline", "run", f"-n{RANKS}", str(Path(__file__).resolve())]
    words = ["--contender", name, "--lanes", str(lanes), "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *words], cwd=folder, capture_output=True, text=True, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    line = done.stdout.partition(MARK)[2].partition("\n")[0]
    spent: list[float] = json.loads(line)
    return spent


def report(found: dict[str, list[list[float]]], steps: int) -> str:
    """Return times per step, and the ratios that matter."""
    rows = []
    for clock, title in enumerate(("CPU", "wall")):
        ms = {}
        for name, readings in found.items():
            ms[name] = [reading[clock] * 1e3 / steps for reading in readings]
        exact = ms["exact=true"]
        times = [spread(ms[name], 1) for name in CONTENDERS]
        others = [spread(ratios(exact, ms[name]), 3) for name in ("exact=false", "hand-written")]
        rows.append([title, *times, *others])
    heads = [f"{name}, ms/step" for name in CONTENDERS]
    return table(["clock", *heads, "exact / free", "exact / hand-written"], rows)


def main() -> None:
    """Let the contenders take turns, or be a rank of one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=4, help="epochs that count, per round")
    parser.add_argument(
        "--lanes", type=int, nargs="*", default=[2, 4], help="micro-batches per step, of both ranks"
    )
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    known = parser.parse_args()
    if known.contender:
        be_a_rank(known)
        return
    steps = -(-len(embedded_digits()[0][1]) // BATCH) * known.epochs
    for lanes in known.lanes:
        found: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
        for number in range(known.rounds):
            for name in rotated(list(CONTENDERS), number):
                found[name].append(measure(name, lanes, known.epochs))
        print(
            f"\n{lanes} lanes on {RANKS} ranks, {known.rounds} rounds of {steps} steps each; median (min-max)\n"
        )
        print(report(found, steps), flush=True)


if __name__ == "__main__":
    main()
