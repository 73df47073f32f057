"""How long does a compiled GPT need from the start of its process to its first step, and how fast is it then?

`python benchmarks/gpu/restart.py` trains GPT-2 124M by the gpt recipe in a new folder, with nothing but sizes set: first with
empty caches, then twice as a requeued job that resumes. The clock starts with the process and
ends when the first step is in the event log, so these starts report every step. The last start reports as often as it
does by default: its rate is that of the recipe. More words are settings for all, such as `exact=false`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, ROWS = 1024, 64
SIZES = ["size=124M", f"context_length={LENGTH}", f"batch.global_size={ROWS}", "vocab_size=50304"]
STARTS = (
    ("empty caches", 20, 1),
    ("requeued", 20, 1),
    ("requeued", 20, 1),
    ("as by default", 200, 20),
)
"""Name, steps, and how often they are reported."""


def step_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of steps so far."""
    log = folder / "gpt" / "events.jsonl"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in events if event["event"] == "StepDone"]


def start(folder: Path, steps: int, every: int, words: list[str]) -> tuple[float, float]:
    """Train up to this step; return the seconds until the first report, and the usual rate in tokens per second."""
    own = [f"steps={steps}", f"runs={folder}", f"log.every_steps={every}", "checkpoint.every=end"]
    own += ["lr.schedule=constant"]
    before, begun = len(step_events(folder)), time.monotonic()
    command = [sys.executable, "-m", "paceline", "train", "gpt", *SIZES, *own, *words]
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    first = 0.0
    while process.poll() is None:
        time.sleep(0.1)
        if not first and len(step_events(folder)) > before:
            first = time.monotonic() - begun
    if process.returncode:
        raise SystemExit((folder / "output").read_text(encoding="utf-8")[-3000:])
    rates = sorted(event["samples_per_s"] for event in step_events(folder)[before:][-10:])
    return first, LENGTH * rates[len(rates) // 2]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="paceline-restart-") as scratch:
        folder = Path(scratch)
        done = 0
        for name, steps, every in STARTS:
            done += steps
            first, rate = start(folder, done, every, sys.argv[1:])
            what = f"first step after {first:.1f} s" if every == 1 else f"{rate:,.0f} tokens/s"
            print(f"{name}: {what}", flush=True)


if __name__ == "__main__":
    main()
