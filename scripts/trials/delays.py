"""How often is the right rank named with the right phase? Random delays on random ranks, and profiles of known causes.

`python scripts/trials/delays.py [--trials 100] [--profiles 10] [--seed 0]`; a trial takes some 6 s on 2 free cores. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from paceline.launch.spec import LaunchSpec, script
from paceline.launch.supervisor import launch
from paceline.measure.profile import profile
from paceline.telemetry.stragglers import find_straggler, read_beats

TRAINING = script(str(Path(__file__).with_name("slow_training.py")))
PHASES = ("data", "forward", "backward", "optimizer", "gc")
CAUSES = {"data": "data_wait", "compute": "compute", "communication": "exposed_communication"}
LANES = 6
RANKS = (2, 3)  # whose ranks have as many lanes each


def trial(dice: random.Random, phase: str, *, once: bool) -> tuple[bool, str]:
    """Make one rank slow, and see whether it is named; return that, and what was found."""
    ranks = dice.choice(RANKS)
    rank, steps = dice.randrange(ranks), 40
    seconds = dice.uniform(0.5, 1.0) if once else dice.uniform(0.01, 0.05)
    with tempfile.TemporaryDirectory(prefix="paceline-slow-") as folder:
        slow = {
            "phase": phase,
            "rank": rank,
            "seconds": seconds,
            "step": dice.randrange(5, steps) if once else 0,
        }
        settings = {f"slow.{name}": value for name, value in slow.items()} | {
            "runs": folder,
            "steps": steps,
        }
        failure = launch(LaunchSpec(TRAINING, ranks, (), settings))
        if failure is not None:
            return False, failure.message
        found = find_straggler(
            read_beats(Path(folder) / "slow" / "ranks", ranks, 0.0), LANES, ranks
        )
    wanted = (rank, phase, "one-off" if once else "chronic")
    named = found and (found.beat.rank, found.phase, found.kind)
    return named == wanted, f"{wanted} of {ranks}, {seconds:.3f} s: {named}"


def profiled(dice: random.Random, phase: str) -> tuple[bool, str]:
    """Profile a training whose largest cause is known; return whether it was found."""
    rank = dice.randrange(2) if phase == "data" else -1
    with tempfile.TemporaryDirectory(prefix="paceline-slow-") as folder:
        words = [
            f"slow.phase={phase}",
            f"slow.rank={rank}",
            f"slow.seconds={dice.uniform(0.05, 0.1):.3f}",
        ]
        verdict, _ = profile(TRAINING, 2, (3, 5), [*words, f"runs={folder}"])
    return verdict.causes[0] == CAUSES[phase], f"{phase}: {verdict.causes}"


def main() -> int:
    """Try, and exit with 1 if fewer than 95 % are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--profiles", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args()
    dice, right, tried = random.Random(known.seed), Counter[str](), Counter[str]()

    def count(kind: str, outcome: tuple[bool, str]) -> None:
        tried[kind] += 1
        right[kind] += outcome[0]
        print(f"{'right' if outcome[0] else 'WRONG'}  {kind}: {outcome[1]}", flush=True)

    for number in range(known.trials):
        once = number // len(PHASES) % 2 == 1
        count(
            "one-off" if once else "chronic", trial(dice, PHASES[number % len(PHASES)], once=once)
        )
    for number in range(known.profiles):
        count("profile", profiled(dice, list(CAUSES)[number % len(CAUSES)]))
    for kind, times in tried.items():
        print(f"{kind}: {right[kind]} of {times} right")
    return 0 if right.total() >= 0.95 * tried.total() else 1


if __name__ == "__main__":
    sys.exit(main())
