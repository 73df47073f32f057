"""What does a set of 100 million records cost before anything is trained? Time to the first batch, and memory.

Run by data.py as `data_scale.py make FOLDER RECORDS SHARDS FILES` and `data_scale.py measure FOLDER START`. A record is 8 bytes, its
number. Where a set has more shards than files, its shards are the same files under other names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy

BATCH, BATCHES = 128, 200


def make(folder: Path, records: int, shards: int, files: int) -> None:
    """Write the set."""
    from paceline.data.shards.index import INDEX, DatasetIndex
    from paceline.data.shards.shard import column_of, write_shard
    from paceline.rundir import write_whole

    folder.mkdir(mode=0o700)
    each = records // shards
    column = column_of("row", numpy.empty(0, dtype=numpy.int64))
    facts = []
    for number in range(shards):
        name, twin = (f"{which:05d}.safetensors" for which in (number, number % files))
        if name == twin:
            rows = numpy.arange(number * each, (number + 1) * each)
            facts.append(write_shard(folder, name, [column], {"row": rows}))
        else:
            os.link(folder / twin, folder / name)
            facts.append(replace(facts[number % files], name=name))
    write_whole(folder / INDEX, DatasetIndex((column,), each, tuple(facts)).to_json())


def measure(folder: Path, start: float) -> dict[str, float]:
    """Read some batches from somewhere within the first epoch."""
    import torch

    from paceline.config import BatchConfig, RunConfig
    from paceline.data.reading.batches import Batches
    from paceline.data.shards.source import ShardSource
    from paceline.data.shards.store import LocalShardStore
    from paceline.world.world import World

    torch.set_num_threads(1)
    torch.index_select(torch.zeros(2), 0, torch.zeros(1, dtype=torch.int64))
    before, begin = memory_mb(), time.perf_counter()
    batches = Batches(
        ShardSource(LocalShardStore(folder)), RunConfig(batch=BatchConfig(BATCH, lanes=1)), World()
    )
    steps = batches.steps(int(start * batches.plan.steps_per_epoch))
    next(steps)
    first_ms = (time.perf_counter() - begin) * 1e3
    for _ in range(BATCHES - 1):
        next(steps)
    after = memory_mb()
    return {"first_ms": first_ms} | {name: after[name] - before[name] for name in before}


def memory_mb() -> dict[str, float]:
    """Return what this process has in memory: of its own, and mapped from files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6
        for line in lines
        if line.startswith(("RssAnon", "RssFile"))
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        sys.stdout.write(json.dumps(measure(Path(sys.argv[2]), float(sys.argv[3]))))
