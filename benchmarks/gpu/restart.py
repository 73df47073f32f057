"""How long does a compiled GPT need from the start of its process to its first step, and how fast is it then?

`python benchmarks/gpu/restart.py` trains GPT-2 124M by the gpt recipe in a new folder, with nothing but sizes set: first with
empty compile caches, then as a requeued job that resumes. The clock starts with the process and ends when the first step is
in the event log. More words are settings for both, such as `exact=false`.
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
STEPS = 60


def step_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of steps so far."""
    log = folder / "gpt" / "events.jsonl"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [event for event in events if event["event"] == "StepDone"]


def start(folder: Path, steps: int, words: list[str]) -> tuple[float, float]:
    """Train up to this step; return the seconds until the first step, and the last rate in tokens per second."""
    own = [f"steps={steps}", f"runs={folder}", "log.every_steps=1", "checkpoint.every=end"]
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
    rates = sorted(event["samples_per_s"] for event in step_events(folder)[before:][10:])
    return first, LENGTH * rates[len(rates) // 2]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="paceline-restart-") as scratch:
        folder = Path(scratch)
        for name, steps in (("empty caches", STEPS), ("requeued", 2 * STEPS)):
            first, rate = start(folder, steps, sys.argv[1:])
            print(f"{name}: first step after {first:.1f} s; {rate:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
