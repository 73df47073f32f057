"""How often, and how soon, the right rank and cause are named: random faults on 2 to 4 ranks, and runs without any.

`python scripts/trials/faults.py [--trials 100] [--seed 0] [--ranks 2,3,4] [--faults stop,loop] [--normal-minutes 60]`. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cut_link

SCRIPT = Path(__file__).with_name("faulty_training.py")
CAUSES = {
    "batch": {"one batch more"},
    "collective": {"another collective"},
    "shape": {"another shape"},
    "first-shape": {"another shape"},
    "raise": {"exception"},
    "stop": {"stopped"},
    "loop": {"own code"},
    "loader": {"reading"},
    "disk": {"saving"},
    "link": {"link"},
}
_LONGEST_S = 120.0


class Trial(NamedTuple):
    """One run that went wrong."""

    fault: str
    ranks: int
    rank: int
    size: int
    """What a rank gives to a collective to which all others give 3, where that is the fault."""


class Outcome(NamedTuple):
    """What was said of it, and how many seconds after it began."""

    right: bool
    seconds: float
    said: str
    limit_s: float = 5.0
    """Within what it was to be said: three steps of the usual length, and 5 s."""


def main() -> int:
    """Run the trials; exit with 1 if fewer than 95 % are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(CAUSES))
    parser.add_argument("--ranks", default="2,3,4", help="among how many each trial chooses")
    parser.add_argument("--normal-minutes", type=float, default=0.0)
    known = parser.parse_args()
    draw, faults = random.Random(known.seed), possible(known.faults.split(","))
    outcomes = defaultdict[str, list[Outcome]](list)
    for number in range(known.trials):
        ranks = draw.choice([int(word) for word in known.ranks.split(",")])
        trial = Trial(
            faults[number % len(faults)], ranks, draw.randrange(ranks), draw.choice([2, 5])
        )
        outcomes[trial.fault].append(outcome := run_trial(trial))
        print(
            f"{number} {trial} {'right' if outcome.right else 'WRONG'} {outcome.seconds:.1f} s: {outcome.said}",
            flush=True,
        )
    alarms = normal_runs(known.normal_minutes)
    return report(outcomes, alarms)


def possible(faults: list[str]) -> list[str]:
    """Return the faults that this machine can make; say which it cannot."""
    reason = cut_link.why_not_here() if "link" in faults else ""
    if reason:
        print(f"link: not tried: {reason}", flush=True)
    return [fault for fault in faults if fault != "link" or not reason]


def report(outcomes: dict[str, list[Outcome]], alarms: int) -> int:
    """Print a line a fault; return the exit code."""
    for fault, found in outcomes.items():
        seconds = sorted(outcome.seconds for outcome in found)
        right = sum(outcome.right for outcome in found)
        print(
            f"{fault}: {right} of {len(found)} right, {sum(o.seconds <= o.limit_s for o in found)} in time, median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s"
        )
    every = [outcome.right for found in outcomes.values() for outcome in found]
    print(f"in all {sum(every)} of {len(every)} right; false alarms: {alarms}")
    return 0 if sum(every) >= 0.95 * len(every) and not alarms else 1


def run_trial(trial: Trial) -> Outcome:
    """Start a run, wait until something is said of its fault, and end it."""
    if trial.fault == "link":
        return run_cut_off(trial)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"FAULT": trial.fault, "FAULT_RANK": str(trial.rank), "FAULT_SIZE": str(trial.size)}
        env["FAULT_MARK"] = str(folder / "begun")
        options = ["-n", str(trial.ranks), "--max-restarts", "0"]
        words = ["batch.global_size=32", "timeout.step_s=30", "epochs=1"]
        words += ["read.workers=1"] if trial.fault == "loader" else []
        words += ["checkpoint.every=10steps"] if trial.fault == "disk" else []
        process = start(folder, options, words, env)
        try:
            return watch(trial, folder, folder / "begun", lambda: process.poll() is None)
        finally:
            end(process)


def run_cut_off(trial: Trial) -> Outcome:
    """Train on hosts of their own, cut one off, and wait until something is said of it."""
    with (
        tempfile.TemporaryDirectory() as name,
        cut_link.cut_off(trial.ranks, trial.rank, Path(name) / "begun") as work,
    ):
        return watch(trial, work, Path(name) / "begun", lambda: True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run at once: the first signal asks it to save, the second does not wait for that."""
    while process.poll() is None:
        process.terminate()
        time.sleep(0.5)


def start(
    folder: Path, options: list[str], words: list[str], env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the training in a folder of its own."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", *options, str(SCRIPT), *words],
            cwd=folder, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def watch(trial: Trial, folder: Path, begun: Path, runs: Callable[[], bool]) -> Outcome:
    """Wait for a verdict of the ranks, or for the page about the failure."""
    limit = time.monotonic() + _LONGEST_S
    verdict, page = (
        folder / "runs" / "run" / name for name in ("hang/verdict.json", "failure.json")
    )
    while time.monotonic() < limit:
        time.sleep(0.05)
        if trial.fault != "raise" and verdict.exists():
            said = json.loads(verdict.read_text())
            right = said["cause"] in CAUSES[trial.fault] and _names(trial, said["ranks"])
            return Outcome(
                right, _after(begun, verdict), said["sentence"], 5 + 3 * _usual_s(verdict.parent)
            )
        if page.exists():
            return _of_page(trial, json.loads(page.read_text()), _after(begun, page))
        if not runs() and not page.exists():
            break
    return Outcome(right=False, seconds=_LONGEST_S, said="nothing")


def _usual_s(folder: Path) -> float:
    """Return the median step, as the ranks wrote it down."""
    return max(json.loads(file.read_text())["usual_s"] for file in folder.glob("[0-9]*.json"))


def _names(trial: Trial, ranks: list[int]) -> bool:
    """Return whether the rank at fault is named. Of two that never did the like, or that a link joins, both are."""
    return ranks == [trial.rank] or (trial.fault in {"first-shape", "link"} and trial.ranks == 2)


def _of_page(trial: Trial, page: dict[str, Any], seconds: float) -> Outcome:
    if trial.fault == "raise":
        right = page["rank"] == trial.rank and "ValueError" in page["how"]
    else:
        right = page["cause"] in CAUSES[trial.fault] and _names(trial, [page["rank"]])
    return Outcome(right, seconds, f"rank {page['rank']} {page['how']}; {page['hang']}")


def _after(begun: Path, file: Path) -> float:
    """Return how long after the fault a file was written."""
    return file.stat().st_mtime - begun.stat().st_mtime if begun.exists() else -1.0


def normal_runs(minutes: float) -> int:
    """Train without a fault for so long, with evaluations and saves; return how often an alarm was given."""
    begun, alarms = time.monotonic(), 0
    while time.monotonic() < begun + 60 * minutes:
        with tempfile.TemporaryDirectory() as name:
            words = [
                "batch.global_size=32",
                "epochs=20",
                "evaluate_steps=20",
                "checkpoint.every=15steps",
            ]
            code = start(Path(name), ["-n", "3"], words, {"FAULT": ""}).wait()
            alarms += (Path(name) / "log").read_text(errors="replace").count("watchdog: no step")
        so_far = (time.monotonic() - begun) / 60
        print(
            f"without a fault for {so_far:.1f} minutes: {alarms} alarms; the last run ended with {code}",
            flush=True,
        )
    return alarms


if __name__ == "__main__":
    sys.exit(main())
