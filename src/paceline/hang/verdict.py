"""What was found to hold a run up, kept: once the ranks are gone, it can no longer be seen which one was stopped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from paceline.rundir import RunDir, write_whole

Cause = Literal[
    "none", "exception", "another collective", "another shape", "one batch more", "one batch less", "stopped", "silent", "gone", "left",
    "reading", "saving", "own code", "link", "stuck",
]  # fmt: skip


@dataclass(frozen=True)
class HangVerdict:
    """What holds a run up."""

    cause: Cause
    ranks: tuple[int, ...]
    """Those at fault."""
    waiting: tuple[int, ...]
    """Those that wait for them."""
    sentence: str

    @property
    def found(self) -> bool:
        """Whether anything is wrong."""
        return self.cause != "none"


def write_verdict(directory: RunDir, verdict: HangVerdict) -> None:
    """Write a verdict, for those who come later."""
    write_whole(directory.hang_verdict, f"{json.dumps(asdict(verdict))}\n".encode(), durable=False)


def read_verdict(directory: RunDir) -> HangVerdict | None:
    """Return what the ranks of the last start found, if they have not moved since."""
    try:
        facts = json.loads(directory.hang_verdict.read_text(encoding="utf-8"))
        ranks, waiting = (tuple(map(int, facts[name])) for name in ("ranks", "waiting"))
        return HangVerdict(facts["cause"], ranks, waiting, str(facts["sentence"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
