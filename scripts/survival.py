"""The proof that nothing is lost: 200 random kills over the toy and mnist recipes, on worlds that change among 1 to 4.

`python scripts/survival.py [--kills 200] [--seed 0]`; it takes about half an hour on 2 cores. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import sys
import time

from paceline.cli.train import recipe
from paceline.verify.chaos import chaos, describe

RECIPES = {
    "toy": ("epochs=60",),
    "mnist": ("epochs=4",),
}


def main() -> int:
    """Strike both recipes, half of the kills each; exit with 1 if any bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args()
    same = True
    for name, words in RECIPES.items():
        begun = time.monotonic()
        kills = known.kills // len(RECIPES)
        verdict = chaos(recipe(name), words, [1, 2, 3, 4], kills, known.seed, sys.stderr)
        print(f"{describe(verdict)} ({(time.monotonic() - begun) / 60:.1f} min)", flush=True)
        same &= verdict.same
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
