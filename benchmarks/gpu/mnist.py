"""How fast is a small network trained on one GPU? `python benchmarks/gpu/mnist.py`

The convolutional network of the mnist recipe, batches of 128, 60,000 digits: by hand (eagerly, and with the whole step in
one CUDA graph), with Accelerate, with Lightning, and the recipe itself. Each round starts every contender once in a
fresh process, in rotated order; ratios are to the hand-written captured loop of the same round. Compiling, and all of the
first epoch, are left out. Lightning and Accelerate must be installed beside Paceline.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ratios import ratios, rotated, spread, table  # noqa: E402 - after the path

NAMES = ("hand-captured", "paceline", "paceline-free", "hand-eager", "accelerate", "lightning")
TRAIN = 60_000


def measure(name: str, epochs: int) -> dict[str, float]:
    """Run one contender; return its median seconds of an epoch: of training, and with the evaluation."""
    words = [sys.executable, str(HERE / "mnist_contenders.py"), name, str(epochs)]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ), check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {what: median(seconds) for what, seconds in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=NAMES)
    known = parser.parse_args()
    names = [name for name in NAMES if name in {*known.only, NAMES[0]}]
    found: dict[str, dict[str, list[float]]] = {name: {"training": [], "all": []} for name in names}
    for number in range(known.rounds):
        for name in rotated(names, number):
            for what, seconds in measure(name, known.epochs).items():
                found[name][what].append(TRAIN / seconds)
            print(
                f"round {number + 1}: {name} {found[name]['training'][-1]:,.0f} samples/s",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for name in names:
        cells = [
            cell
            for what in ("training", "all")
            for cell in _cells(found[name][what], found[NAMES[0]][what])
        ]
        rows.append([name, *cells])
    print(
        table(
            ["contender", "samples/s, training", "ratio", "samples/s, with evaluation", "ratio"],
            rows,
        )
    )


def _cells(values: list[float], base: list[float]) -> list[str]:
    return [f"{median(values):,.0f}", spread(ratios(values, base))]


if __name__ == "__main__":
    main()
