"""How good is the shuffle of a set that is read in blocks? `python scripts/shuffle_quality.py [--epochs 20] [--seed 0]`.

The set is the worst case: 60,000 samples sorted by their 10 classes, in 60 blocks of 1,000. For each window it prints how
far apart neighbours in the order were in the set (full shuffle: 1), how far the classes of a batch of 128 are from being
equally many, and how many batches lack some of them. A second table has the same memory in smaller and larger blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from paceline.data.order import Order, Places

SAMPLES, CLASSES, BATCH = 60_000, 10, 128
BLOCK, WINDOWS = 1_000, (1, 2, 4, 8, 16, 32, 60)
HELD, BLOCKS = (
    16_000,
    (4_000, 1_000, 250, 50),
)  # a window of so many samples, in blocks of these sizes
FEW = 8


class Quality(NamedTuple):
    """What is measured of some epochs."""

    mean_distance: float
    """Between the numbers of neighbours."""
    median_distance: float
    imbalance: float
    """Mean total-variation distance between the classes of a batch and those of the set."""
    poor: float
    """The share of batches with fewer than 8 classes."""


def measure(block: int, window: int, epochs: int, seed: int) -> Quality:
    """Return the means over some epochs."""
    order, places = Order(SAMPLES, block, window), numpy.arange(SAMPLES)
    found = [_measure(order.at(places, seed, epoch)) for epoch in range(epochs)]
    return Quality(*(float(numpy.mean(values)) for values in zip(*found, strict=True)))


def _measure(samples: Places) -> Quality:
    distances = numpy.abs(numpy.diff(samples))
    counts = _class_counts(samples)
    imbalance = numpy.abs(counts / BATCH - 1 / CLASSES).sum(axis=1) / 2
    poor = ((counts > 0).sum(axis=1) < FEW).mean()
    return Quality(
        float(distances.mean()),
        float(numpy.median(distances)),
        float(imbalance.mean()),
        float(poor),
    )


def _class_counts(samples: Places) -> NDArray[numpy.int64]:
    """Return how often each class is in each whole batch."""
    batches = len(samples) // BATCH
    classes = samples[: batches * BATCH] // (SAMPLES // CLASSES)
    numbers = numpy.repeat(numpy.arange(batches), BATCH) * CLASSES + classes
    return numpy.bincount(numbers, minlength=batches * CLASSES).reshape(batches, CLASSES)


def table(orders: Iterable[tuple[int, int]], epochs: int, seed: int) -> str:
    """Return a line for each (block, window), relative to a full shuffle."""
    full = measure(SAMPLES, 1, epochs, seed)
    lines = [
        "| block | window | of the dataset | mean distance | median distance | imbalance | against full | batches with < 8 classes |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for block, window in orders:
        found = measure(block, window, epochs, seed)
        cells = [
            f"{block:,}",
            f"{window}",
            f"{window * block / SAMPLES:.0%}",
            f"{found.mean_distance / full.mean_distance:.2f}",
            f"{found.median_distance / full.median_distance:.2f}",
            f"{found.imbalance:.3f}",
            f"{found.imbalance / full.imbalance:.1f} x",
            f"{found.poor:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="epochs that are averaged")
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args()
    print(table([(BLOCK, window) for window in WINDOWS], known.epochs, known.seed), end="\n\n")
    print(table([(block, HELD // block) for block in BLOCKS], known.epochs, known.seed))


if __name__ == "__main__":
    main()
