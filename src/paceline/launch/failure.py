"""Which rank failed first, and in whose words."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import STOPPED, PacelineError


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, and what it said of it."""

    rank: int
    code: int | None
    time_s: float
    text: str = ""
    what: str = ""
    known: bool = False
    lost_peer: bool = False
    tail: tuple[str, ...] = ()
    permanent: bool = False

    @classmethod
    def read(
        cls, rank: int, code: int | None, time_s: float, failure_file: Path, tail: tuple[str, ...]
    ) -> RankEnd:
        """Join what the launcher saw with what the rank wrote down, if it could."""
        try:
            said = json.loads(failure_file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return cls(rank, code, time_s, tail=tail)
        words = said["time_s"], said["text"], said["what"], said["known"], said["lost_peer"]
        return cls(rank, code, *words, tail, permanent=said["permanent"])


@dataclass(frozen=True)
class Failure:
    """The failure that ended a launch."""

    rank: int
    exit_code: int
    message: str
    permanent: bool = False
    """Whether it would only come again."""
    progress: int = -1
    """The step of the newest checkpoint by then; -1: none is known."""
    how: str = ""
    """How the rank ended, in a few words."""
    details: str = ""
    """What it said of it: a traceback, or its last lines."""
    run: str = ""
    """The folder of its run; empty: it had not come so far."""


class RunFailed(PacelineError):
    """A run that a verb started to look at it did not end well."""

    def __init__(self, name: str, ranks: int, failure: Failure, launches: int = 1) -> None:
        where = f"on {ranks} rank{'s' if ranks > 1 else ''}{f' after {launches} launches' if launches > 1 else ''}"
        if failure.exit_code == STOPPED:
            super().__init__(f"{name} was told to stop {where}; nothing is kept", fix="start again")
        else:
            super().__init__(
                f"{name} failed {where}:\n{failure.message}",
                fix="make it run with `paceline run` first",
            )
        self.exit_code = failure.exit_code


def stopped(progress: int | None) -> Failure:
    """Return the end of a launch that was told to stop; None: whether anything was saved is not known here."""
    start = (
        "its newest checkpoint"
        if progress is not None
        else "its newest checkpoint, if there is one"
    )
    if progress == -1:
        start = "where it was: this launch has saved nothing"
    return Failure(
        -1, STOPPED, f"stopped (exit code {STOPPED}): the same command goes on from {start}"
    )


def find_culprit(ranks: list[RankEnd]) -> Failure:
    """Return the first cause. Ranks that only lost a peer are believed last; a silent end before theirs explains them."""
    spoke = [end for end in ranks if end.text and not end.lost_peer]
    silent = [end for end in ranks if not end.text and end.code]
    left_early = [end for end in ranks if not end.text and end.code == 0]
    lost_peer = [end for end in ranks if end.lost_peer]
    for candidates in (spoke, silent, left_early):
        if candidates:
            return _failure(min(candidates, key=lambda end: end.time_s))
    assert lost_peer, "no rank failed"
    first = min(lost_peer, key=lambda end: end.time_s)
    unanswering = [end for end in ranks if end.code is None and not end.text]
    return _no_answer(first, unanswering) if unanswering else _failure(first)


def _no_answer(first: RankEnd, unanswering: list[RankEnd]) -> Failure:
    """Return the failure for ranks that are there but do not move."""
    who = " or ".join(str(end.rank) for end in unanswering)
    return Failure(
        unanswering[0].rank,
        1,
        f"error: rank {who} did not answer; all ranks were ended. Rank {first.rank} waited for it, then said:\n\n{first.text}\n"
        "  fix: see whether it was frozen, swapped out, or long in code of its own; timeout.step_s says how long to wait",
        how="did not answer",
        details=first.text,
    )


def _failure(end: RankEnd) -> Failure:
    if end.known:
        return Failure(
            end.rank,
            _own_code(end),
            end.text,
            permanent=end.permanent,
            how=_own_end(end),
            details=end.text,
        )
    if end.text:
        return Failure(
            end.rank,
            _own_code(end),
            f"rank {end.rank} failed with {end.what}; all ranks were ended. Its own words:\n\n{end.text}",
            how=_own_end(end),
            details=end.text,
        )
    said = "\n".join(f"  {line}" for line in end.tail) or "  (nothing)"
    return Failure(
        end.rank,
        _exit_code(end.code),
        f"error: rank {end.rank} {_silent_end(end.code)}; all ranks were ended. Last it said:\n{said}\n  fix: {_silent_fix(end.code)}",
        how=_silent_end(end.code),
        details="\n".join(end.tail),
    )


def _own_end(end: RankEnd) -> str:
    return f"failed with {end.what}{', out of memory' if 'Memory' in end.what else ''}"


def _own_code(end: RankEnd) -> int:
    """Return the code of a rank that said why it failed; how it died after that does not matter."""
    return end.code if end.code and end.code > 0 else 1


def _silent_end(code: int | None) -> str:
    if code and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == 0:
        return "left with exit code 0 while others were still training"
    return f"exited with code {code} without an exception"


def _silent_fix(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "see whether the machine ran out of memory (dmesg), or a scheduler ended it"
    if code and code < 0:
        return "look at the lines above: a crash in native code prints its stack there"
    return "look for sys.exit or os._exit in the script: every rank must reach the end of `paceline.join`"


def _exit_code(code: int | None) -> int:
    """Return the code for the shell; a rank that left early without an error is a failure all the same."""
    return 128 - code if code and code < 0 else code or 1
