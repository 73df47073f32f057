"""How fast a set is read on this machine: `paceline data bench`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config import BatchConfig, ReadConfig, RunConfig

if TYPE_CHECKING:
    from paceline.data.reading.batches import Batches

_STARTS = (0.0, 0.5, 0.9)


@dataclass(frozen=True)
class Pace:
    """How fast one pass went."""

    samples_per_s: float
    mb_per_s: float
    cpu_ns_per_sample: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "address", metavar="SET", help="folder or address of a set, or an HDF5 file"
    )
    parser.add_argument(
        "--batch", type=int, default=128, help="samples of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=16, help="blocks that are mixed (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="longest time of a pass (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(known: argparse.Namespace) -> int:
    """Read the set from several starts, then twice from end to end, and print how fast that went."""
    import torch

    from paceline.data.reading.batches import Batches
    from paceline.data.reading.open_dataset import open_dataset
    from paceline.world.world import World

    torch.set_num_threads(1)
    read = ReadConfig(window=known.window)
    config = RunConfig(epochs=1, batch=BatchConfig(known.batch, lanes=1), read=read)
    firsts = [
        _first_ms(Batches(open_dataset(known.address, config), config, World()), start)
        for start in _STARTS
    ]
    source = open_dataset(known.address, replace(config, epochs=2))
    batches = Batches(source, config, World())
    cold, warm = (_pass(batches, known.seconds) for _ in range(2))
    size = source.bytes_per_sample
    if known.json:
        found: dict[str, Any] = {"samples": len(source), "bytes_per_sample": size}
        found["first_batch_ms"] = dict(zip((str(start) for start in _STARTS), firsts, strict=True))
        print(
            json.dumps(found | {"first_pass": asdict(cold), "later_pass": asdict(warm)}, indent=2)
        )
        return 0
    print(f"{known.address}: {len(source):,} samples of {size:,} bytes")
    print(
        "first batch: "
        + ", ".join(
            f"{ms:.1f} ms at {start:.0%}" for ms, start in zip(firsts, _STARTS, strict=True)
        )
    )
    for name, pace in (("first pass", cold), ("later pass", warm)):
        print(
            f"{name}: {pace.samples_per_s:,.0f} samples/s, {pace.mb_per_s:,.0f} MB/s, {pace.cpu_ns_per_sample:,.0f} ns of CPU a sample"
        )
    return 0


def _first_ms(batches: Batches, start: float) -> float:
    """Return how long the first step takes, from some part of the epoch on."""
    begun = time.perf_counter()
    steps = batches.steps(int(start * batches.plan.steps_per_epoch))
    next(steps)
    taken_s = time.perf_counter() - begun
    steps.close()
    return 1e3 * taken_s


def _pass(batches: Batches, longest_s: float) -> Pace:
    """Read one epoch, or as much of it as there is time for."""
    begun, cpu_begun, samples = time.perf_counter(), time.process_time(), 0
    for step in _for_so_long(batches.steps(), begun + longest_s):
        samples += step.plan.samples
    taken_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    size = batches.source.bytes_per_sample
    return Pace(samples / taken_s, samples * size / taken_s / 1e6, 1e9 * cpu_s / samples)


def _for_so_long(steps: Generator[Any], limit: float) -> Iterator[Any]:
    for step in steps:
        yield step
        if time.perf_counter() > limit:
            steps.close()
            return
