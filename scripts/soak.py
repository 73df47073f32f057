"""Does a run grow? A training with evaluations, saves, killed ranks and `paceline watch` beside it, measured for an hour.

`python scripts/soak.py [--minutes 60] [--kills 50] [--seed 0]`. It prints a table of memory, file handles and threads of
launcher, ranks and watcher, and of the event log, and exits with 1 if anything grows. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from paceline.checkpoint.local_storage import LocalStorage
from paceline.errors import STOPPED
from paceline.rundir import RunDir
from paceline.terminal import table

PACELINE = (sys.executable, "-m", "paceline")
WORDS = "mnist -n 2 --max-restarts 100000 name=soak epochs=1000000 checkpoint.every=50steps"
RANK = "paceline.launch.rank_local"
SAMPLE_S = 1.0
ENDS_S = 300.0
SETTLED_S = 15.0  # a rank this old has loaded all that it needs
WITH_KILLS = 0.8  # the share of the time with kills; in the rest one start must not grow
MIB = 1 << 20
SLACK = {"MiB": 8.0, "handles": 3.0, "threads": 2.0, "bytes per step": 20.0}
SHARE = 0.1  # what may be more at the end, besides the slack


@dataclass
class Series:
    """A quantity over time."""

    values: list[float] = field(default_factory=list)

    def ends(self) -> tuple[float, float]:
        """Return the medians of the first and of the last quarter."""
        count = max(1, len(self.values) // 4)
        return statistics.median(self.values[:count]), statistics.median(self.values[-count:])


class Soak:
    """One run under observation."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._dice = folder, random.Random(seed)
        self.run = RunDir(folder / "runs" / "soak")
        self.series: dict[tuple[str, str], Series] = {}
        self.kills, self.watchers, self._last = 0, 0, {"start": 0.0, "step": 0.0, "bytes": 0.0}
        self._of_start: dict[str, float] = {}

    def note(self, what: str, unit: str, value: float) -> None:
        """Keep a value."""
        self.series.setdefault((what, unit), Series()).values.append(value)

    def sample(self, launcher: int, watcher: int, *, kills_are_over: bool) -> None:
        """Measure all processes once."""
        self._keep("launcher", measured(psutil.Process(launcher)))
        self._keep("watcher", measured(psutil.Process(watcher)))
        ranks = [rank for rank in self.ranks(launcher) if age_s(rank) > SETTLED_S]
        found = [facts for facts in map(measured, ranks) if facts]
        if not found:
            return
        most = {unit: max(facts[unit] for facts in found) for unit in found[0]}
        if self._last["start"] != ranks[0].create_time() and self._of_start:
            self._keep("ranks, last of each start", self._of_start)
        self._last["start"], self._of_start = ranks[0].create_time(), most
        if kills_are_over:
            self._keep("ranks, within one start", most)

    def sample_log(self, step: int) -> None:
        """Measure how many bytes of events a step adds."""
        size = float(self.run.events.stat().st_size)
        if step > self._last["step"]:
            rate = (size - self._last["bytes"]) / (step - self._last["step"])
            self.note("event log", "bytes per step", rate)
        self._last |= {"step": float(step), "bytes": size}

    def _keep(self, what: str, facts: dict[str, float]) -> None:
        for unit, value in facts.items():
            self.note(what, unit, value)

    def ranks(self, launcher: int) -> list[psutil.Process]:
        """Return the ranks that run now."""
        with contextlib.suppress(psutil.Error):
            return [
                child
                for child in psutil.Process(launcher).children()
                if RANK in " ".join(child.cmdline())
            ]
        return []

    def kill_one(self, launcher: int) -> None:
        """Kill a random rank."""
        if ranks := self.ranks(launcher):
            with contextlib.suppress(psutil.Error):
                self._dice.choice(ranks).kill()
                self.kills += 1

    def moments(self, kills: int, seconds: float) -> list[float]:
        """Return random moments, in order."""
        return sorted(self._dice.uniform(0.0, seconds) for _ in range(kills))


def measured(process: psutil.Process) -> dict[str, float]:
    """Return memory, file handles and threads of a process; nothing if it has just ended."""
    with contextlib.suppress(psutil.Error), process.oneshot():
        return {
            "MiB": process.memory_info().rss / MIB,
            "handles": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }
    return {}


def age_s(process: psutil.Process) -> float:
    """Return how long a process has run."""
    with contextlib.suppress(psutil.Error):
        return time.time() - process.create_time()
    return 0.0


def newest_step(run: RunDir) -> int:
    """Return the step of the newest checkpoint."""
    return next(iter(LocalStorage(run.checkpoints).steps()), 0)


class Watcher:
    """`paceline watch` in a terminal. It ends by itself if a restart takes more than 30 s; then it is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.starts = folder, 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; it is started if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self._process, self.starts = self._start(), self.starts + 1
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = pty.openpty()
        command = [*PACELINE, "watch", "soak", "--every", "1"]
        shown = subprocess.Popen(
            command, cwd=self._folder, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        threading.Thread(target=drain, args=(ours,), daemon=True).start()
        return shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def drain(descriptor: int) -> None:
    """Read a terminal until it is closed."""
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass


def soak(known: argparse.Namespace, folder: Path) -> Soak:
    """Train, kill and measure for the given time."""
    state, seconds = Soak(folder, known.seed), known.minutes * 60
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen([*PACELINE, "train", *WORDS.split()], cwd=folder, stdout=output, stderr=output) as launcher,
    ):  # fmt: skip
        try:
            wait_for_checkpoint(state, launcher, folder / "output")
            with Watcher(folder) as watcher:
                observe(state, launcher, watcher, known.kills, seconds)
        finally:
            launcher.send_signal(signal.SIGTERM)
            code = launcher.wait(ENDS_S)
    assert code == STOPPED, (
        f"the run ended with exit code {code}: {(folder / 'output').read_text()[-2000:]}"
    )
    return state


def wait_for_checkpoint(state: Soak, launcher: subprocess.Popen[bytes], output: Path) -> None:
    """Wait for the first checkpoint."""
    while not newest_step(state.run):
        assert launcher.poll() is None, output.read_text()[-2000:]
        time.sleep(SAMPLE_S)


def observe(
    state: Soak,
    launcher: subprocess.Popen[bytes],
    watcher: Watcher,
    kills: int,
    seconds: float,
) -> None:
    """Sample and kill until the time is over. A start that has saved nothing yet is not killed again."""
    begun, saved = time.monotonic(), 0
    moments = state.moments(kills, WITH_KILLS * seconds)
    while (spent := time.monotonic() - begun) < seconds:
        assert launcher.poll() is None, "the run ended"
        state.sample(launcher.pid, watcher.pid, kills_are_over=not moments)
        if (step := newest_step(state.run)) > saved:
            state.sample_log(step)
            if moments and spent > moments[0]:
                state.kill_one(launcher.pid)
                moments.pop(0)
            saved = step
        time.sleep(SAMPLE_S)
    state.watchers = watcher.starts


def report(state: Soak) -> bool:
    """Print the table; return whether anything grows."""
    rows, growing = [], []
    for (what, unit), series in state.series.items():
        first, last = series.ends()
        grows = last > first * (1 + SHARE) + SLACK[unit]
        growing += [f"{what} ({unit})"] if grows else []
        trend = "grows" if grows else "does not grow"
        rows.append([what, unit, str(len(series.values)), f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}", trend])  # fmt: skip
    table(["process", "unit", "samples", "first", "last", "change", "trend"], rows)
    print(
        f"{state.kills} ranks killed; {state.watchers} starts of the watcher; step {newest_step(state.run):,}"
    )
    print(f"verdict: grows: {', '.join(growing)}" if growing else "verdict: does not grow")
    return bool(growing)


def main() -> int:
    """Soak; exit with 1 if anything grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    known = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return int(report(soak(known, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
