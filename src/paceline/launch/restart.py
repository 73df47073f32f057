"""Restarts of a failed launch, from its newest checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from paceline.errors import EnvironmentUnfit
from paceline.launch.failure import Failure, stopped
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec
from paceline.launch.supervisor import launch
from paceline.rundir import RunDir
from paceline.runlock import claimed

DEFAULT_RESTARTS = 3

Launch = Callable[..., Failure | None]


@dataclass(frozen=True)
class Restarts:
    """How often to restart. Only consecutive failures without progress count."""

    most: int | None = None
    """None: three times, but only once there is a checkpoint; a script that cannot start is not retried."""
    fewest_ranks: int = 0
    """After a failure without progress, restart with one rank less, down to this number; 0: keep the number of ranks."""

    @property
    def limit(self) -> int:
        """The most restarts in a row without progress."""
        return DEFAULT_RESTARTS if self.most is None else self.most

    def allow(self, failure: Failure, failures: int) -> bool:
        """Return whether to restart after so many consecutive failures without progress."""
        if failure.permanent or failure.on_request:
            return False
        if self.most is None:
            return failure.progress >= 0 and failures <= self.limit
        return failures <= self.limit


def launch_with_restarts(
    spec: LaunchSpec,
    restarts: Restarts,
    screen: TextIO | None,
    say: Callable[[str], None],
    begin: Launch = launch,
) -> Failure | None:
    """Launch until the run finishes, is asked to stop, or has failed too often; `begin` launches the ranks once."""
    with StopSignals() as signals, contextlib.ExitStack() as locks:
        launch_once = partial(begin, screen=screen, signals=signals)
        return _launch_repeatedly(spec, restarts, launch_once, say, signals, locks)


def _launch_repeatedly(
    spec: LaunchSpec,
    restarts: Restarts,
    launch_once: Callable[[LaunchSpec], Failure | None],
    say: Callable[[str], None],
    signals: StopSignals,
    locks: contextlib.ExitStack,
) -> Failure | None:
    newest, failures = -1, 0
    while True:
        failure = launch_once(spec)
        if failure is None:
            return None
        progressed = failure.progress > newest
        newest = max(newest, failure.progress)
        failures = 1 if progressed else failures + 1
        failure = replace(failure, progress=newest)
        if failure.unsaved and newest >= 0:  # an earlier start of this launch saved
            failure = replace(stopped(newest, signals.first), progress=newest, run=failure.run)
        if signals.count or not restarts.allow(failure, failures):
            return failure
        if restarts.fewest_ranks and not progressed:
            most = max(spec.most_ranks, spec.size)
            fewer = max(restarts.fewest_ranks, spec.ranks - 1)
            spec = replace(spec, ranks=fewer, most_ranks=most)
        spec = replace(spec, attempt=spec.attempt + 1)
        if failure.run:
            _show_restart(RunDir(Path(failure.run)), locks)
        line = restart_line(
            spec.size, newest, failures, restarts.limit, foreign=spec.target.foreign
        )
        say(f"{failure.message}\n{line}")


def _show_restart(run: RunDir, locks: contextlib.ExitStack) -> None:
    """Hold the launcher's lock of a run, by which `paceline watch` knows that a failed run is about to restart."""
    with contextlib.suppress(
        EnvironmentUnfit, OSError
    ):  # another node's launcher holds it, or no disk is left
        locks.enter_context(claimed(run.launch_lock, patience_s=0))


def restart_line(ranks: int, step: int, failures: int, most: int, *, foreign: bool = False) -> str:
    """Return the message about a restart; what a foreign script has saved is unknown.

    >>> restart_line(4, 120, 1, 3)
    'restarting on 4 ranks from the checkpoint of step 120 (attempt 1 of 3 without progress)'
    """
    start = f"from the checkpoint of step {step}"
    if step < 0:
        start = "from where this launch began: it saved no checkpoint"
    plural = "" if ranks == 1 else "s"
    if foreign and step < 0:
        return (
            f"restarting on {ranks} rank{plural} (restart {failures} of {most}); "
            "the script resumes by its own checkpoints, if it saves any"
        )
    return f"restarting on {ranks} rank{plural} {start} (attempt {failures} of {most} without progress)"
