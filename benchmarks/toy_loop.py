"""What does a loop cost when the step itself costs almost nothing?

`python benchmarks/toy_loop.py` trains the toy recipe (Linear 20 -> 1, mean squared error, SGD, 2,048 samples in memory,
shuffled each epoch, global batch 32, one thread a rank) by hand, with Paceline and with its peers. Each round
starts every contender once in fresh processes, in rotated order; ratios are taken within a round.

Steady state: each rank reads its CPU clock and the wall clock when the loss is called after the warm-up epochs,
and again some whole epochs later; CPU is summed over ranks. Start-up: the same clocks, from the start of the
process until the loss of the second step is called, which is when the first step is over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import peers_python
from ratios import ratios, rotated, spread, table

WARMUP_EPOCHS, STEPS_PER_EPOCH, SAMPLES = 2, 64, 2048
CONTENDERS = {
    "hand": "hand-written, tensors indexed each step",
    "hand-gathered": "hand-written, tensors indexed once an epoch",
    "paceline": "Paceline, exact=true",
    "paceline-free": "Paceline, exact=false",
    "fabric": "Fabric, hand-written indexing",
    "fabric-loader": "Fabric, DataLoader over a TensorDataset",
    "accelerate": "Accelerate, hand-written indexing",
    "accelerate-loader": "Accelerate, DataLoader over a TensorDataset",
    "lightning": "Lightning Trainer (lean), hand-written indexing",
    "lightning-loader": "Lightning Trainer (lean), DataLoader over a TensorDataset",
}
STARTING = ("hand", "paceline")


@dataclass(frozen=True)
class Reading:
    """CPU seconds over all ranks, and wall seconds."""

    cpu_s: float
    wall_s: float


Readings = dict[str, list[Reading]]


def start(
    python: Path, name: str, world: int, words: Sequence[int], folder: Path
) -> list[dict[str, list[float]]]:
    """Run one contender to its end; return the clock readings of each rank."""
    launcher = ["-m", "paceline", "run", f"-n{world}"] if world > 1 else []
    script = str(Path(__file__).with_name("toy_contenders.py"))
    command = [str(python), *launcher, script, name, *map(str, words), str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{name} at world {world} failed:\n{done.stdout}{done.stderr}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def steady_state(python: Path, name: str, world: int, epochs: int) -> Reading:
    """Return what some epochs cost after the warm-up."""
    begin = WARMUP_EPOCHS * STEPS_PER_EPOCH
    end = begin + epochs * STEPS_PER_EPOCH
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(python, name, world, (WARMUP_EPOCHS + epochs + 1, begin, end), Path(folder))
    return Reading(
        sum(rank["cpu_s"][1] - rank["cpu_s"][0] for rank in ranks),
        ranks[0]["wall_s"][1] - ranks[0]["wall_s"][0],
    )


def start_up(python: Path, name: str) -> Reading:
    """Return what it costs to come to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        (rank,) = start(python, name, 1, (1, 1, 2), Path(folder))
    return Reading(rank["cpu_s"][0], rank["wall_s"][0] - begun)


def measure_loops(
    python: Path, names: Sequence[str], world: int, rounds: int, epochs: int
) -> Readings:
    """Run all contenders round by round."""
    found: Readings = defaultdict(list)
    for number in range(rounds):
        for name in rotated(names, number):
            found[name].append(steady_state(python, name, world, epochs))
            note(f"world {world}, round {number + 1}/{rounds}: {name} {found[name][-1]}")
    return found


def measure_starts(python: Path, rounds: int) -> Readings:
    """Start both contenders by turns; the first round, which may write byte code, does not count."""
    found: Readings = defaultdict(list)
    for number in range(rounds + 1):
        for name in rotated(STARTING, number):
            found[name].append(start_up(python, name))
            note(f"start-up, round {number}/{rounds}: {name} {found[name][-1]}")
    return {name: readings[1:] for name, readings in found.items()}


def report(found: Readings, unit: str, scale: float, digits: int) -> str:
    """Return a table of all contenders against the hand-written loop."""
    rows = []
    for name, label in CONTENDERS.items():
        if name in found:
            cells = [label]
            for clock in ("cpu_s", "wall_s"):
                values, base = (
                    [getattr(reading, clock) * scale for reading in found[key]]
                    for key in (name, "hand")
                )
                cells += [spread(ratios(values, base)), spread(values, digits)]
            rows.append(cells)
    return table(["contender", "CPU ratio", f"CPU {unit}", "wall ratio", f"wall {unit}"], rows)


def note(text: str) -> None:
    """Say how far the benchmark is."""
    sys.stderr.write(f"{text}\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the steady state")
    parser.add_argument("--start-rounds", type=int, default=9, help="rounds of the start-up")
    parser.add_argument("--epochs", type=int, default=20, help="measured epochs, 64 steps each")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2], help="numbers of ranks")
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(CONTENDERS),
        choices=list(CONTENDERS),
        help="contenders beside hand",
    )
    known = parser.parse_args()
    python = peers_python()
    names = [name for name in CONTENDERS if name == "hand" or name in known.only]
    for world in known.worlds:
        found = measure_loops(python, names, world, known.rounds, known.epochs)
        print(
            f"\nWorld {world}, {known.rounds} rounds of {known.epochs * STEPS_PER_EPOCH:,} steps; median (min-max)\n"
        )
        print(report(found, "us/sample", 1e6 / (known.epochs * SAMPLES), 1), flush=True)
    if known.start_rounds:
        print(f"\nStart-up at world 1, {known.start_rounds} rounds; median (min-max)\n")
        print(report(measure_starts(python, known.start_rounds), "s", 1.0, 2))


if __name__ == "__main__":
    main()
