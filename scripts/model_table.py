"""Train a table of models on 1, 2 and 3 ranks and through two resumes: each gives the same bits, or is refused.

`python scripts/model_table.py [-k WORD ...] [--list]`; all of it takes some minutes on 2 cores. Every line says "same",
or "refused" with the message. The exit code is 1 if a line says "different" or "traceback". Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from combinations.ranks import preload
from combinations.table import COMBINATIONS
from combinations.verdicts import Judge, Verdict


def main() -> int:
    """Judge the chosen lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", nargs="*", default=[], help="only lines that contain all these words")
    parser.add_argument("-j", type=int, default=2, help="lines to judge at the same time")
    parser.add_argument("--list", action="store_true", help="only show the names")
    known = parser.parse_args()
    names = [name for name in COMBINATIONS if all(word in name for word in known.k)]
    if known.list:
        print("\n".join(names))
        return 0
    preload()
    begun, counts = time.monotonic(), Counter[str]()
    for verdict in judged(names, known.j):
        print(f"{verdict.name:<48} {verdict}", flush=True)
        counts[verdict.kind] += 1
    found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"{len(names)} combinations in {time.monotonic() - begun:.0f} s: {found}")
    return int(bool(counts["different"] or counts["traceback"]))


def judged(names: list[str], at_once: int) -> Iterator[Verdict]:
    """Yield the verdict of every line, in order."""
    with tempfile.TemporaryDirectory(prefix="paceline-table-") as folder:
        judges = [Judge(Path(folder) / str(number)) for number in range(at_once)]
        free = list(judges)

        def judge(name: str) -> Verdict:
            mine = free.pop()
            try:
                return mine.judge(name)
            finally:
                free.append(mine)

        try:
            with ThreadPoolExecutor(at_once) as pool:
                yield from pool.map(judge, names)
        finally:
            for each in judges:
                each.close()


if __name__ == "__main__":
    sys.exit(main())
