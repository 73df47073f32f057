"""The first cause of a failed launch: which rank failed first, how, and the message about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import STOPPED, PacelineError
from paceline.launch.output_error import crash_in, error_in
from paceline.launch.rank_local import names_lost_peer
from paceline.launch.signals import signal_name
from paceline.safe_open import read_json

_TAIL_LINES = 20
_LARGEST_REPORT = 1 << 24

_USAGE_CODE = 2  # of argparse


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int | None
    """Its exit code; None: it had to be killed."""
    time_s: float
    text: str = ""
    """Its traceback or error message; empty: it wrote none."""
    what: str = ""
    """The class of its exception."""
    known: bool = False
    """Whether the text is an error of ours, which needs no traceback."""
    lost_peer: bool = False
    """Whether the exception only says that another rank is gone."""
    tail: tuple[str, ...] = ()
    """The last lines of its output."""
    permanent: bool = False
    """Whether a restart would fail in the same way."""

    @property
    def problem(self) -> str:
        """The class of its exception and the first line of its message."""
        if self.known:
            return f"{self.what}: {self.text.removeprefix('error: ').partition(chr(10))[0]}"
        lines = [
            line for line in self.text.splitlines() if line.partition(":")[0].endswith(self.what)
        ]
        return lines[-1].strip() if lines else self.what

    @classmethod
    def read(
        cls, rank: int, code: int | None, time_s: float, failure_file: Path, tail: tuple[str, ...]
    ) -> RankEnd:
        """Combine the exit that the launcher saw with the report of the rank, if it wrote one."""
        try:
            report = read_json(failure_file, _LARGEST_REPORT)
        except (OSError, ValueError):
            return cls(rank, code, time_s, tail=tail)
        return cls(
            rank=rank,
            code=code,
            time_s=report["time_s"],
            text=report["text"],
            what=report["what"],
            known=report["known"],
            lost_peer=report["lost_peer"],
            tail=tail,
            permanent=report["permanent"],
        )

    @classmethod
    def from_output(
        cls, rank: int, code: int | None, time_s: float, tail: tuple[str, ...]
    ) -> RankEnd:
        """Return the end of a rank that writes no report; a positive code and a traceback are an exception."""
        error = error_in(tail) if code and code > 0 else None
        if error is None:
            return cls(rank, code, time_s, tail=tail)
        lost_peer = names_lost_peer(error.text)
        return cls(rank, code, time_s, error.text, error.what, lost_peer=lost_peer, tail=tail)


@dataclass(frozen=True)
class Failure:
    """The failure that ended a launch."""

    rank: int
    exit_code: int
    message: str
    permanent: bool = False
    """Whether a restart would fail in the same way."""
    progress: int = -1
    """The step of the newest checkpoint at that moment; -1: unknown."""
    how: str = ""
    """How the rank ended, as a verb phrase; empty: it ran on another host, and the files of the run tell."""
    details: str = ""
    """Its traceback, or the last lines of its output."""
    run: str = ""
    """The run folder; empty: it failed before it had one."""
    fix: str = ""
    """What to do about it; empty: the traceback tells."""
    how_to_resume: str = ""
    """What to type next; not shown while the launcher restarts the run by itself."""
    on_request: bool = False
    """Whether it was asked to stop, which is no failure of the run."""
    unsaved: bool = False
    """Whether a signal ended it before it could save."""
    lost_peer: bool = False
    """Whether the message only says that ranks waited for another one: the verdict of the watchdog says more."""


class RunFailed(PacelineError):
    """A run that a verb started in order to measure or compare it did not finish."""

    cause = "it was asked to stop"
    """The last line of its error."""

    def __init__(self, name: str, ranks: int, failure: Failure, launches: int = 1) -> None:
        where = f"on {ranks} rank{'s' if ranks > 1 else ''}"
        if launches > 1:
            where += f" after {launches} launches"
        if failure.on_request:
            super().__init__(
                f"{name} was asked to stop {where}; no results were saved", fix="run it again"
            )
        else:
            problem, _, fix = failure.message.removeprefix("error: ").rpartition("\n  fix: ")
            if not problem:  # a traceback
                problem, fix = fix, "make it run with `paceline run` first"
            super().__init__(f"{name} failed {where}:\n{problem}", fix=fix)
            self.cause = problem.strip().splitlines()[-1]
        self.exit_code, self.on_request = failure.exit_code, failure.on_request


def stopped(progress: int | None, by: signal.Signals | None = None) -> Failure:
    """Return the end of a launch that was asked to stop, by a signal or a time limit.

    `progress` is the step of the newest checkpoint of this launch; -1: there is none; None: unknown on this host.

    >>> stopped(595, signal.SIGINT).message
    'Stopped by Ctrl-C, checkpoint saved at step 595 (exit code 75). Rerun the same command to resume.'
    """
    resume = "Rerun the same command to resume"
    if progress is None:
        state, resume = "", f"{resume} from the newest checkpoint, if there is one"
    elif progress < 0:
        state, resume = ", this launch saved no checkpoint", f"{resume} from where it began"
    else:
        state = f", checkpoint saved at step {progress:,}"
    cause = f" by {signal_name(by)}" if by is not None else ""
    message = f"Stopped{cause}{state} (exit code {STOPPED}). {resume}."
    return Failure(-1, STOPPED, message, on_request=True)


def ended_by(number: signal.Signals, *, foreign: bool = False) -> Failure:
    """Return the end of a launch that a signal ended before the ranks could save.

    >>> ended_by(signal.SIGTERM).message
    'Stopped by SIGTERM; this launch saved no checkpoint (exit code 143). Rerun the same command to start again.'
    >>> ended_by(signal.SIGTERM, foreign=True).message
    'Stopped by SIGTERM (exit code 143). Rerun the same command; the script resumes if it saves checkpoints itself.'
    """
    code = 128 + number
    saved, then = "; this launch saved no checkpoint", " to start again."
    if foreign:  # what it has saved is unknown
        saved, then = "", "; the script resumes if it saves checkpoints itself."
    message = (
        f"Stopped by {signal_name(number)}{saved} (exit code {code}). Rerun the same command{then}"
    )
    return Failure(-1, code, message, on_request=True, unsaved=True)


def out_of_time() -> Failure:
    """Return the end of a launch of a foreign script whose `--stop-after` was over."""
    message = (
        f"Stopped by --stop-after, with SIGTERM (exit code {STOPPED}). Rerun the same command; "
        "the script resumes if it saves checkpoints itself."
    )
    return Failure(-1, STOPPED, message, on_request=True, unsaved=True)


def out_of_memory(failure: Failure) -> Failure:
    """Return the failure of a rank that the kernel killed for its memory."""
    cause = "the machine, or its memory limit, ran out of memory"
    fix = "use a smaller batch per rank (more lanes or ranks), or request more memory"
    rest = failure.message
    if failure.fix:
        rest = rest.removesuffix(f"\n  fix: {failure.fix}")
    message = f"error: {cause}\n{rest.removeprefix('error: ')}\n  fix: {fix}"
    return replace(failure, how=f"{failure.how}: {cause}", message=message, fix=fix)


def find_culprit(
    ranks: list[RankEnd], *, foreign: bool = False, other_hosts: bool = False
) -> Failure:
    """Return the first cause. A rank that only lost a peer is blamed last: an exit without a report explains it.

    A foreign script gets no advice about `paceline.Run`, which it does not use. With other hosts, the cause may be
    there.
    """
    raised = [end for end in ranks if end.text and not end.lost_peer]
    killed = [end for end in ranks if not end.text and end.code]
    left_early = [end for end in ranks if not end.text and end.code == 0]
    others = "; the other ranks were stopped" if len(ranks) > 1 else ""
    if len(ranks) > 1 and len(raised) == len(ranks) and len({end.text for end in raised}) == 1:
        first = min(raised, key=lambda end: end.rank)
        return _failure(first, "", foreign=foreign, alike=len(ranks))
    for candidates in (raised, killed, left_early):
        if candidates:
            first = min(candidates, key=lambda end: end.time_s)
            return _failure(first, others, foreign=foreign)
    lost_peer = [end for end in ranks if end.lost_peer]
    assert lost_peer, "no rank failed"
    first = min(lost_peer, key=lambda end: end.time_s)
    unresponsive = [end for end in ranks if end.code is None and not end.text]
    if unresponsive:
        return _unresponsive(first, unresponsive, foreign=foreign)
    if other_hosts:
        return _lost_host(first)
    return _failure(first, others, foreign=foreign)


def _lost_host(end: RankEnd) -> Failure:
    message = (
        f"error: rank {end.rank} lost the connection to a rank of another host\n"
        "  fix: read the output of `paceline run` on the other hosts"
    )
    return Failure(end.rank, end.code if end.code and end.code > 0 else 1, message)


def _unresponsive(first: RankEnd, unresponsive: list[RankEnd], *, foreign: bool) -> Failure:
    """Return the failure for ranks that still exist but make no progress."""
    ranks = " or ".join(str(end.rank) for end in unresponsive)
    limit = "init_process_group(timeout=...)" if foreign else "timeout.step_s"
    waited = f"Rank {first.rank} waited for it and failed with:\n\n{first.text}"
    fix = (
        "check whether it was suspended, swapped out or busy in its own code; "
        f"{limit} sets how long ranks wait"
    )
    message = f"error: rank {ranks} did not respond; all ranks were stopped. {waited}\n  fix: {fix}"
    rank = unresponsive[0].rank
    how = "did not respond"
    return Failure(rank, 1, message, how=how, details=waited, fix=fix, lost_peer=True)


def _failure(end: RankEnd, others: str, *, foreign: bool, alike: int = 0) -> Failure:
    if not end.text:
        return _without_report(end, others, foreign=foreign)
    message = end.text
    if not end.known:
        message = f"rank {end.rank} crashed with {end.what}{others}. Traceback:\n\n{end.text}"
    if alike and not end.known:
        message = f"all {alike} ranks crashed with {end.what}. Traceback of rank {end.rank}:\n\n{end.text}"
    how = f"failed with {end.problem}" + (f", like all {alike} ranks" if alike else "")
    return Failure(
        end.rank,
        # The code of a rank that reported its error; how it died after that does not matter.
        end.code if end.code and end.code > 0 else 1,
        message,
        permanent=end.known and end.permanent,
        how=how,
        details=end.text,
        lost_peer=end.lost_peer,
    )


def _without_report(end: RankEnd, others: str, *, foreign: bool) -> Failure:
    how = _exit_phrase(end.code)
    is_crash = end.code is not None and end.code < 0
    tail = (crash_in(end.tail) if is_crash else end.tail)[-_TAIL_LINES:]
    output = "".join(f"\n  {line}" for line in tail) or " none"
    fix = _exit_fix(end.code, foreign=foreign)
    if end.code == _USAGE_CODE and any(line.startswith("usage:") for line in tail):
        how, fix = "refused its arguments (code 2)", "correct the words after the script"
    message = f"error: rank {end.rank} {how}{others}. Its last output:{output}\n  fix: {fix}"
    details = "\n".join(tail)
    return Failure(end.rank, _shell_code(end.code), message, how=how, details=details, fix=fix)


def _exit_phrase(code: int | None) -> str:
    if code and code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    if code == 0:
        return "exited with code 0 while other ranks were still training"
    return f"exited with code {code}, without an uncaught exception"


def _exit_fix(code: int | None, *, foreign: bool) -> str:
    if code == -signal.SIGKILL:
        return "check whether the machine ran out of memory (dmesg) or a scheduler killed it"
    if code and code < 0:
        return "read the lines above: a crash in native code prints its stack there"
    end = "its end" if foreign else "the end of `with paceline.Run(config)`"
    return f"read its last output; if that does not say why, look for sys.exit or os._exit in the script: every rank must reach {end}"


def _shell_code(code: int | None) -> int:
    """Return the exit code for the shell; code 0 of a rank that left too early counts as a failure."""
    return 128 - code if code and code < 0 else code or 1
