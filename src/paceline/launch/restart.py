"""How a launch that failed is started again, from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO

from paceline.errors import STOPPED
from paceline.launch.failure import Failure
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec
from paceline.launch.supervisor import launch

DEFAULT_RESTARTS = 3

Launch = Callable[..., Failure | None]


@dataclass(frozen=True)
class Restarts:
    """How often to start again. Only failures without progress in between are counted."""

    most: int | None = None
    """None: three times, and only if something has been saved; a script that cannot begin is not tried again."""
    fewest_ranks: int = 0
    """Go on with fewer ranks, down to so many, where starting again led nowhere; 0: always with as many."""

    def allow(self, failure: Failure, spent: int) -> bool:
        """Return whether to start again after the `spent`-th failure in a row without progress."""
        if failure.permanent or failure.exit_code == STOPPED:
            return False
        if self.most is None:
            return failure.progress >= 0 and spent <= DEFAULT_RESTARTS
        return spent <= self.most


def launch_with_restarts(
    spec: LaunchSpec,
    restarts: Restarts,
    screen: TextIO | None,
    say: Callable[[str], None],
    begin: Launch = launch,
) -> Failure | None:
    """Launch until it is done, is told to stop, or fails once too often; `begin` runs the ranks once, to their end."""
    with StopSignals() as signals:
        return _launch_again(
            spec, restarts, partial(begin, screen=screen, signals=signals), say, signals
        )


def _launch_again(
    spec: LaunchSpec,
    restarts: Restarts,
    begin: Callable[[LaunchSpec], Failure | None],
    say: Callable[[str], None],
    signals: StopSignals,
) -> Failure | None:
    best, spent = -1, 0
    while True:
        failure = begin(spec)
        if failure is None:
            return None
        moved = failure.progress > best
        best, spent = max(best, failure.progress), 1 if moved else spent + 1
        failure = replace(failure, progress=best)
        if signals.count or not restarts.allow(failure, spent):
            return failure
        if restarts.fewest_ranks and not moved:
            spec = replace(spec, ranks=max(restarts.fewest_ranks, spec.ranks - 1))
        spec = replace(spec, attempt=spec.attempt + 1)
        most = DEFAULT_RESTARTS if restarts.most is None else restarts.most
        say(f"{failure.message}\n{restart_line(spec.size, failure.progress, spent, most)}")


def restart_line(ranks: int, step: int, spent: int, most: int) -> str:
    """Return what is said when a launch begins again.

    >>> restart_line(4, 120, 1, 3)
    'starting again on 4 ranks, from the checkpoint of step 120 (attempt 1 of 3 without progress)'
    """
    start = (
        f"the checkpoint of step {step}"
        if step >= 0
        else "where it began: this launch has saved nothing"
    )
    return f"starting again on {ranks} rank{'' if ranks == 1 else 's'}, from {start} (attempt {spent} of {most} without progress)"
