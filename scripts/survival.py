"""The proof that nothing is lost: random kills of mnist, a GPT and a loop of one's own, on worlds that change among 1 to 4.

`python scripts/survival.py [--kills 1000] [--seed 0] [--only gpt] [--warm]`. With --warm the launcher forks its ranks
after it has imported torch, as the tests do: real processes and signals, without two seconds per start. Jobs that Slurm
ends and requeues are in scripts/requeue.py. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paceline.cli.train import recipe
from paceline.launch.spec import script
from paceline.verify.chaos import chaos, describe

ROOT = Path(__file__).resolve().parents[1]
GPT = (
    "layers=2", "heads=2", "embedding_dim=32", "context_length=32", "steps=200", "batch.global_size=8", "level=bytes",
    f"data_folder={ROOT / 'ARCHITECTURE.md'}",
)  # fmt: skip
TRAININGS = {
    "mnist": (recipe("mnist"), ("epochs=4",)),
    "gpt": (recipe("gpt"), GPT),
    "dcgan": (script(str(ROOT / "examples" / "dcgan.py")), ("batch.global_size=16",)),
}


def main() -> int:
    """Kill each training equally often; exit with 1 if any bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TRAININGS)
    parser.add_argument("--warm", action="store_true")
    known = parser.parse_args()
    if known.warm:
        _fork_ranks()
    chosen = [known.only] if known.only else list(TRAININGS)
    same = True
    for number, name in enumerate(chosen):
        begun = time.monotonic()
        kills = known.kills * (number + 1) // len(chosen) - known.kills * number // len(chosen)
        verdict = chaos(*TRAININGS[name], [1, 2, 3, 4], kills, known.seed, sys.stderr)
        print(f"{describe(verdict)} ({(time.monotonic() - begun) / 60:.1f} min)", flush=True)
        same &= verdict.same
    return 0 if same else 1


def _fork_ranks() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import paceline.launch.rank_local
    import paceline.train.run  # noqa: F401 - imported once, for all ranks
    from support.forkserver import warm_ranks

    warm_ranks()


if __name__ == "__main__":
    sys.exit(main())
