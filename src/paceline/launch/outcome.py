"""How the ranks that a launcher has started ended, and what that means for the launch."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline import handover
from paceline.errors import STOPPED
from paceline.launch.failure import Failure, RankEnd, ended_by, find_culprit, out_of_time, stopped
from paceline.launch.logs import RankOutput
from paceline.launch.signals import STOP_SIGNALS, StopSignals
from paceline.launch.spec import LaunchSpec


@dataclass
class Rank:
    """A rank that this process has started."""

    number: int
    process: subprocess.Popen[bytes]
    output: RankOutput
    failure_file: Path
    joined_mark: Path
    graceful_stop_mark: Path
    unaware_mark: Path
    has_reports: bool = True
    """Whether its program reports exceptions; another interpreter only prints them."""
    ended_s: float = 0.0
    stop_requested: bool = False

    @property
    def end(self) -> RankEnd:
        """How it ended, as far as is known now."""
        code, tail = self.process.returncode, tuple(self.output.tail)
        if self.has_reports:
            return RankEnd.read(self.number, code, self.ended_s, self.failure_file, tail)
        return RankEnd.from_output(self.number, code, self.ended_s, tail)

    @property
    def stopped(self) -> bool:
        """Whether it saved and exited on request, or died of a stop signal before it could handle it."""
        return self.process.returncode == STOPPED or -(self.process.returncode or 0) in STOP_SIGNALS


def any_failed(ranks: list[Rank]) -> bool:
    """Return whether a rank failed, or exited before a rendezvous in which others wait for it."""
    if any(rank.process.returncode for rank in ranks):
        return True
    left = any(rank.process.returncode == 0 and not rank.joined_mark.exists() for rank in ranks)
    return left and any(
        rank.process.returncode is None and rank.joined_mark.exists() for rank in ranks
    )


def progress_of(rendezvous: Path) -> int:
    """Return the step of the newest checkpoint that the ranks have reported; -1: unknown."""
    return handover.read_progress(handover.progress_file(rendezvous))


def outcome(
    spec: LaunchSpec, ranks: list[Rank], signals: StopSignals, rendezvous: Path
) -> Failure | None:
    """Return why the launch ended; None if the run finished."""
    if all(rank.process.returncode == 0 for rank in ranks):
        return out_of_time() if signals.is_time_over else None
    asked = signals.count or any(rank.stopped for rank in ranks)
    failure = _stop_outcome(spec, ranks, signals, rendezvous) if asked else None
    if failure is None and any_failed(ranks):
        ends = [rank.end for rank in ranks]
        return find_culprit(ends, foreign=spec.target.foreign, other_hosts=spec.nodes > 1)
    return failure


def _stop_outcome(
    spec: LaunchSpec, ranks: list[Rank], signals: StopSignals, rendezvous: Path
) -> Failure | None:
    """Return how ranks ended that were asked to stop; None if one of them failed for another reason."""
    if any(_failed_by_itself(rank) for rank in ranks):
        return None
    codes = [rank.process.returncode for rank in ranks]
    if signals.first == signal.SIGINT and STOPPED not in codes:
        raise KeyboardInterrupt
    if None in codes:
        return _killed_after_request(ranks)
    if signals.is_time_over:
        return out_of_time()
    if STOPPED not in codes:
        died_of = signal.Signals(max(-code for code in codes)) if min(codes) < 0 else None
        number = signals.first or died_of or signal.SIGTERM
        return ended_by(number, foreign=spec.target.foreign)
    progress = progress_of(rendezvous)
    # Only the host of rank 0 knows the newest checkpoint; a foreign script reports none.
    unknown = ranks[0].number != 0 or (spec.target.foreign and progress < 0)
    if progress >= 0 and not unknown:
        return Failure(-1, STOPPED, "", on_request=True)  # rank 0 has said why, and where it saved
    return stopped(None if unknown else progress, signals.first)


def _failed_by_itself(rank: Rank) -> bool:
    end = rank.end
    killed = end.code is not None and end.code < 0 and not rank.stopped
    return killed or bool(end.text and not end.lost_peer)


def _killed_after_request(ranks: list[Rank]) -> Failure:
    late = " and ".join(str(rank.number) for rank in ranks if rank.process.returncode is None)
    message = (
        f"error: rank {late} did not exit in time after the request to stop, and was killed\n"
        "  fix: rerun the same command to resume from the newest checkpoint, if there is one"
    )
    return Failure(-1, 128 + signal.SIGTERM, message, on_request=True)
