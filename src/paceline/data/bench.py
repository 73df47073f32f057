"""How fast a set is read on this machine: `paceline data bench`."""

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
class Pace:
    """How fast one pass went."""

    samples_per_s: float
    mb_per_s: float
    cpu_ns_per_sample: float


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
    firsts = [
        _first_ms(Batches(open_dataset(arguments.address, config), config, World()), start)
        for start in _STARTS
    ]
    source = open_dataset(arguments.address, replace(config, epochs=2))
    batches = Batches(source, config, World())
    cold, warm = (_pass(batches, arguments.seconds) for _ in range(2))
    size = source.bytes_per_sample
    if arguments.json:
        found: dict[str, Any] = {"samples": len(source), "bytes_per_sample": size}
        found["first_batch_ms"] = dict(zip((str(start) for start in _STARTS), firsts, strict=True))
        print(
            json.dumps(found | {"first_pass": asdict(cold), "later_pass": asdict(warm)}, indent=2)
        )
        return 0
    print(f"{arguments.address}: {len(source):,} samples of {size:,} bytes")
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
