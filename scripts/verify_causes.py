"""Let `paceline verify` find the mistake of every broken script, and judge the causes that it names.

`python scripts/verify_causes.py [WORD ...] [-j 2] [--later]` takes some minutes on 2 cores; words choose scripts by
name, `--later` those that were written after the diagnosis. The exit code is 1 if a mistake was not found, or a cause
was named wrongly. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from broken_scripts import first_forty, later_ten
from broken_scripts.table import Answer, ask_verify


def main() -> int:
    """Ask verify about the chosen scripts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only scripts whose name contains all these words")
    parser.add_argument("-j", type=int, default=2, help="scripts to verify at the same time")
    parser.add_argument("--later", action="store_true", help="the scripts that were written later")
    known = parser.parse_args()
    every = later_ten.BROKEN if known.later else first_forty.BROKEN
    chosen = [script for script in every if all(word in script.name for word in known.words)]
    begun, counts = time.monotonic(), Counter[str]()
    print(f"{'mistake':<46} {'true cause':<22} {'named cause':<22} {'verdict':<10} seconds")
    processes = multiprocessing.get_context("fork")  # one per script: it forks the ranks
    with (
        tempfile.TemporaryDirectory(prefix="paceline-broken-") as folder,
        processes.Pool(known.j, maxtasksperchild=1) as pool,
    ):
        for answer in pool.imap(partial(ask_verify, folder=Path(folder)), chosen):
            print(line_of(answer), flush=True)
            counts[answer.verdict] += 1
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"{len(chosen)} scripts in {time.monotonic() - begun:.0f} s: {found}")
    return int(bool(counts["not found"] or counts["wrong"]))


def line_of(answer: Answer) -> str:
    """Return the line of the table."""
    broken = answer.broken
    truth = f"{broken.where}: {broken.why}"
    line = f"{broken.name:<46} {truth:<22} {answer.named:<22} {answer.verdict:<10} {answer.seconds:.0f}"
    return line if answer.verdict == "right" else f"{line}\n{answer.text}"


if __name__ == "__main__":
    raise SystemExit(main())
