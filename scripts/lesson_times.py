"""How long does each lesson take here? `python scripts/lesson_times.py [NUMBER ...]`: as a reader runs them, in an empty folder each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from paceline.course.catalog import all_lessons


def main() -> int:
    """Run the lessons that are asked for, or all, one after the other; exit with 1 if one fails or takes a minute."""
    wanted, bad = set(map(int, sys.argv[1:])), 0
    for lesson in all_lessons():
        if wanted and lesson.number not in wanted:
            continue
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "paceline", "lesson", str(lesson.number)]
            code = subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode
        seconds = time.perf_counter() - begun
        bad += code != 0 or seconds >= 60
        print(
            f"{lesson.number:3}  {seconds:5.1f} s  (says {lesson.seconds} s)  exit code {code}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
