"""Measure how fast a dataset is read on this machine: `paceline data bench`."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.config.arguments import option, positional

if TYPE_CHECKING:
    from paceline.data.reading.batches import Batches

_STARTS = (0.0, 0.5, 0.9)


@dataclass(frozen=True)
class ReadSpeed:
    """The speed of one pass over the dataset."""

    samples_per_s: float
    mb_per_s: float
    cpu_ns_per_sample: float

    def __str__(self) -> str:
        rate = f"{self.samples_per_s:,.0f} samples/s, {self.mb_per_s:,.0f} MB/s"
        return f"{rate}, {self.cpu_ns_per_sample:,.0f} ns of CPU per sample"


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """Reads the dataset from several starting points, then twice from beginning to end."""

    address: str = positional(metavar="DATASET")
    """Folder or URL of a dataset, or an HDF5 file."""
    batch: int = 128
    """Samples per step."""
    window: int = 16
    """Blocks in the shuffle window (read.window)."""
    seconds: float = option(10.0, metavar="S")
    """Longest time of one pass."""
    json: bool = False
    """Print the measurements as JSON."""


def main(arguments: BenchArguments) -> int:
    """Measure how fast the dataset is read; return the exit code."""
    import torch

    from paceline.data.reading.batches import Batches
    from paceline.data.reading.open_dataset import open_dataset
    from paceline.world.world import World

    torch.set_num_threads(1)
    read = ReadConfig(window=arguments.window)
    config = RunConfig(epochs=1, batch=BatchConfig(arguments.batch, lanes=1), read=read)
    first_ms = {}
    for start in _STARTS:
        batches = Batches(open_dataset(arguments.address, config), config, World())
        first_ms[start] = _first_batch_ms(batches, start)
    source = open_dataset(arguments.address, replace(config, epochs=2))
    batches = Batches(source, config, World())
    cold, warm = (_time_pass(batches, arguments.seconds) for _ in range(2))
    if arguments.json:
        report: dict[str, Any] = {
            "samples": len(source),
            "bytes_per_sample": source.bytes_per_sample,
            "first_batch_ms": {str(start): ms for start, ms in first_ms.items()},
            "first_pass": asdict(cold),
            "later_pass": asdict(warm),
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"{arguments.address}: {len(source):,} samples of {source.bytes_per_sample:,} bytes")
    print("first batch: " + ", ".join(f"{ms:.1f} ms at {at:.0%}" for at, ms in first_ms.items()))
    print(f"first pass: {cold}")
    print(f"later pass: {warm}")
    return 0


def _first_batch_ms(batches: Batches, start: float) -> float:
    """Return the time to the first step, from a fraction of the epoch on."""
    begun = time.perf_counter()
    steps = batches.steps(int(start * batches.plan.steps_per_epoch))
    next(steps)
    taken_s = time.perf_counter() - begun
    steps.close()
    return 1e3 * taken_s


def _time_pass(batches: Batches, longest_s: float) -> ReadSpeed:
    """Read one epoch, or as much of it as the time allows."""
    begun, cpu_begun, samples = time.perf_counter(), time.process_time(), 0
    for step in _until(begun + longest_s, batches.steps()):
        samples += step.plan.samples
    taken_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    size = batches.source.bytes_per_sample
    return ReadSpeed(samples / taken_s, samples * size / taken_s / 1e6, 1e9 * cpu_s / samples)


def _until(limit: float, steps: Generator[Any]) -> Iterator[Any]:
    for step in steps:
        yield step
        if time.perf_counter() > limit:
            steps.close()
            return
