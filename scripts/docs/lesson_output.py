"""Run lessons and keep their output for the site: `python scripts/docs/lesson_output.py [NUMBER ...]` writes lessons/output/NN.txt.

Each lesson runs as a reader runs it, in an empty folder. Names of this machine and its folders are replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.course.catalog import Lesson, all_lessons

FOLDER = Path(__file__).resolve().parents[2] / "lessons" / "output"
_SKIPPED = "(skipped: needs "
_WIDEST = 200
_LONGEST = 60
"""Lines of one command that are kept: a profiler's table is longer."""


def main() -> int:
    """Run the lessons that are asked for, or all; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    wanted, failed = set(parser.parse_args().numbers), 0
    FOLDER.mkdir(exist_ok=True)
    for lesson in all_lessons():
        if wanted and lesson.number not in wanted:
            continue
        output = output_of(lesson)
        failed += not output
        is_whole = output and _SKIPPED not in output
        if is_whole:
            (FOLDER / f"{lesson.number:02d}.txt").write_text(output, encoding="utf-8")
        state = "ok" if is_whole else "skipped: not all of it can run here" if output else "failed"
        print(f"{lesson.number:3}  {state}", flush=True)
    return 1 if failed else 0


def output_of(lesson: Lesson) -> str:
    """Return the commands of a lesson with their output; nothing if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "paceline", "lesson", str(lesson.number)]
        env = os.environ | {"XDG_DATA_HOME": f"{folder}/data", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            return ""
        return cleaned(done.stdout, lesson, folder)


def cleaned(said: str, lesson: Lesson, folder: str) -> str:
    """Return the commands and their output, without the explanation before and the hints after them."""
    said = "$ " + said.partition("\n\n$ ")[2]
    said = re.split(r"\n\n?(?=Its exercise: |Next: )", said)[0].rstrip()
    for path, name in ((str(lesson.path.parent), "lessons"), (f"{folder}/", "")):
        said = said.replace(path, name)
    said = re.sub(rf"(\bnode |\(){re.escape(socket.gethostname())}\b", r"\1n0", said)
    blocks = re.split(r"\n\n(?=\$ )", said)
    return "\n\n".join(map(_cut, blocks)) + "\n"


def _cut(block: str) -> str:
    lines = [line[:_WIDEST].rstrip() for line in block.splitlines()]
    lines[0] = block.splitlines()[0]
    return "\n".join(lines if len(lines) <= _LONGEST else [*lines[:_LONGEST], "..."])


if __name__ == "__main__":
    sys.exit(main())
