"""What the page about a failure says: facts, a page of markdown, and the last lines of a message."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import RunDir
from paceline.terminal import plain


@dataclass(frozen=True)
class FailurePage:
    """How a run failed."""

    run: str
    rank: int
    """The first that failed; -1: not known."""
    node: str
    how: str
    words: str
    """A traceback, or the last lines that it wrote."""
    cause: str
    """What held the run up before, in a word or two, as in docs/hang.md; empty: nothing did."""
    hang: str
    """The same in one sentence."""
    step: int
    steps: tuple[dict[str, Any], ...]
    """The last figures of steps."""
    checkpoint: str
    """The newest; empty: none."""
    checkpoint_step: int
    slurm: str
    """How Slurm says that its last job ended; empty: there was none, or Slurm has forgotten it."""
    resume: str
    written: bool = False

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        facts = asdict(self)
        del facts["written"]
        return facts

    def text(self) -> str:
        """Return the page, as markdown that is read well as it is."""
        who = f"{f'rank {self.rank}' if self.rank >= 0 else 'a rank'}{f' (node {self.node})' if self.node else ''}"
        lines = [
            f"# {plain(Path(self.run).name)} failed",
            "",
            f"{who} {self.how}, in step {self.step + 1}.",
        ]
        lines += [f"Slurm: {self.slurm}."] if self.slurm else []
        lines += ["", f"Before that: {self.hang}."] if self.hang else []
        if self.words:
            lines += [
                "",
                "## Its own words",
                "",
                *(f"    {plain_line(line)}" for line in self.words.splitlines()),
            ]
        if self.steps:
            lines += ["", "## The last steps", "", "| step | loss | samples/s |", "|---|---|---|"]
            lines += [
                f"| {row['step']} | {row['loss']:.6g} | {row['samples_per_s']:.1f} |"
                for row in self.steps
            ]
        lines += ["", "## To go on", ""]
        start = (
            f"From step {self.checkpoint_step}: {self.checkpoint}"
            if self.checkpoint
            else "Nothing was saved."
        )
        lines += [plain(start), "", f"    {plain(self.resume)}"]
        return "\n".join(lines) + "\n"

    def last_lines(self) -> list[str]:
        """Return what the message of the failure itself does not say."""
        held = [f"before that: {self.hang}"] if self.hang else []
        steps = ", ".join(f"step {row['step']} loss {row['loss']:.4g}" for row in self.steps[-3:])
        start = (
            f"step {self.checkpoint_step} ({self.checkpoint})"
            if self.checkpoint
            else "the beginning: nothing was saved"
        )
        lines = [
            *held,
            *([f"last: {steps}"] if steps else []),
            f"goes on from {start}",
            f"  {self.resume}",
        ]
        return [plain_line(line) for line in [*lines, f"page: {RunDir(Path(self.run)).failure}"]]


def plain_line(line: str) -> str:
    """Return a line that orders a terminal nothing, its indent kept."""
    return " " * (len(line) - len(line.lstrip(" "))) + plain(line.lstrip(" "))
