"""How long until the mnist recipe has 99 % of the test digits right, on one GPU? `python benchmarks/gpu/accuracy.py FOLDER`

FOLDER holds MNIST's IDX files. Ten seeds, each in a fresh process. The clock runs from the first word of the recipe that
concerns the data: reading, bringing to the GPU, all steps (the first ones, which set up cuDNN and are recorded, too) and the
evaluations, up to the end of the first epoch with 99 %. Python's imports and joining the world are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

WANTED = 0.99
SETTINGS = "epochs=6 batch.global_size=512 batch.lanes=1 lr.base=4e-3 lr.reference_batch=512 precision=bf16 capture=true"


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return the same function, whose seconds are added up."""

    def run(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        found = function(*given, **named)
        spent[0] += time.perf_counter() - begun
        return found

    return run


def train(folder: str, seed: int) -> dict[str, float]:
    """Train once; return how long it took, and how good it became."""
    from paceline.config import config_from_words
    from paceline.recipes import mnist
    from paceline.train import run

    spent = [0.0]
    vars(mnist).update(read_digits=timed(mnist.read_digits, spent))
    vars(run).update(Batches=timed(run.Batches, spent))  # they copy the digits to the GPU
    os.chdir(tempfile.mkdtemp(prefix="paceline-gpu-"))
    fixed = [
        "device=cuda",
        "data=mnist",
        f"data_folder={folder}",
        f"seed={seed}",
        "checkpoint.every=end",
    ]
    mnist.main(config_from_words(mnist.MnistConfig, [*fixed, *SETTINGS.split()]))
    events = [
        json.loads(line)
        for line in Path("runs/mnist/events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    begun = next(event["time_s"] for event in events if event["event"] == "RunStarted")
    epochs = [event for event in events if event["event"] == "EpochDone"]
    reached = [event["time_s"] - begun for event in epochs if event["metrics"]["acc"] >= WANTED]
    steps = reached[0] if reached else math.inf
    return {"reading_s": spent[0], "steps_s": steps, "accuracy": epochs[-1]["metrics"]["acc"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--run", type=int, default=-1)
    known = parser.parse_args()
    folder = str(Path(known.folder).resolve())
    if known.run >= 0:
        print("\n" + json.dumps(train(folder, known.run)))
        return
    found = []
    for seed in range(known.seeds):
        words = [sys.executable, str(Path(__file__).resolve()), folder, "--run", str(seed)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
    missed = [run for run in found if not math.isfinite(run["steps_s"])]
    print(f"{len(found) - len(missed)} of {len(found)} seeds reached {WANTED:.0%}")
    found = [run for run in found if run not in missed]
    if len(found) < 2:
        raise SystemExit("too few to tell a spread")
    for name in ("reading_s", "steps_s", "accuracy"):
        values = [run[name] for run in found]
        print(
            f"{name}: {mean(values):.4f} ± {stdev(values):.4f} ({min(values):.4f}-{max(values):.4f})"
        )
    both = [run["reading_s"] + run["steps_s"] for run in found]
    print(f"together: {mean(both):.2f} ± {stdev(both):.2f} s ({min(both):.2f}-{max(both):.2f})")


if __name__ == "__main__":
    main()
