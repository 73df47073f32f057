"""The failure page of a run: as data, as Markdown, and as the last lines of an error message."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir
from paceline.terminal import plain

_NO_CHECKPOINT = "No checkpoint was saved: it starts from step 0."
_OWN_CHECKPOINTS = "The script resumes by its own checkpoints, if it saves any:"


@dataclass(frozen=True)
class FailurePage:
    """How a run failed, and how to resume it."""

    run: str
    rank: int
    """The first rank that failed; -1: unknown."""
    node: str
    how: str
    words: str
    """Its traceback, or its last output."""
    cause: str
    """The cause of a hang before the failure, as in docs/hang.md; empty: there was none."""
    hang: str
    """The same as a sentence."""
    step: int
    steps: tuple[dict[str, Any], ...]
    """Metrics of the last steps."""
    checkpoint: str
    """The newest checkpoint; empty: none."""
    checkpoint_step: int
    slurm: str
    """How the last job ended by Slurm's account; empty: no job, or Slurm no longer knows it."""
    resume: str
    fix: str = ""
    """What to do about it; empty: the traceback tells."""
    written: bool = False
    time_s: float = 0.0
    """When it failed, in seconds since 1970; 0: unknown."""

    def facts(self) -> dict[str, Any]:
        """Return the data with the keys of docs/hang.md."""
        facts = asdict(self)
        del facts["written"]
        return facts

    @property
    def verdict(self) -> str:
        """How the run failed, as one sentence: the same on every screen and in the events."""
        rank = f"rank {self.rank}" if self.rank >= 0 else "a rank"
        node = f" (node {self.node})" if self.node else ""
        step = f", in step {self.step + 1}" if self.step >= 0 else ""
        slurm = f"; Slurm: {self.slurm}" if self.slurm else ""
        return plain(f"{rank}{node} {self.how}{step}{slurm}")

    def text(self) -> str:
        """Return the page as Markdown."""
        lines = [f"# {plain(Path(self.run).name)} failed", "", f"{self.verdict}."]
        if self.time_s:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time_s))
            lines += ["", f"This was at {when}. The page is removed when the run is complete."]
        if self.hang:
            lines += ["", f"Before that: {self.hang}."]
        if self.words:
            lines += ["", "## Traceback or last output", ""]
            lines += [f"    {plain_line(line)}" for line in self.words.splitlines()]
        if self.fix:
            lines += ["", f"Fix: {plain(self.fix)}."]
        lines += self._step_table()
        start = _NO_CHECKPOINT if self.step >= 0 else _OWN_CHECKPOINTS
        if self.checkpoint:
            start = f"From step {self.checkpoint_step}: {self.checkpoint}"
        lines += ["", "## To resume", "", plain(start), "", f"    {plain(self.resume)}"]
        return "\n".join(lines) + "\n"

    def _step_table(self) -> list[str]:
        if not self.steps:
            return []
        lines = ["", "## Last steps", "", "| step | loss | samples/s |", "|---|---|---|"]
        for row in self.steps:
            speed = f"{row['samples_per_s']:.1f}"
            lines.append(f"| {row['step']} | {row['loss']:.6g} | {speed} |")
        return lines

    def last_lines(self) -> list[str]:
        """Return the lines that follow the message of the failure."""
        lines = []
        if self.hang:
            lines.append(f"before that: {self.hang}")
        if self.steps:
            steps = [f"step {row['step']} loss {row['loss']:.4g}" for row in self.steps[-3:]]
            lines.append(f"last: {', '.join(steps)}")
        if self.checkpoint:
            lines.append(f"resumes from step {self.checkpoint_step} ({self.checkpoint})")
        else:
            early = "checkpoint.every=50steps saves earlier"
            lines.append(f"no checkpoint yet: this starts from step 0 ({early})")
        lines.append(f"  {self.resume}")
        page = RunDir(Path(self.run)).failure
        if page.is_file():  # it cannot be written to a full disk
            lines.append(f"page: {page}")
        return [plain_line(line) for line in lines]


def plain_line(line: str) -> str:
    """Return a line without control sequences, its indent kept."""
    text = line.lstrip(" ")
    return " " * (len(line) - len(text)) + plain(text)
