"""What user code asks of a run besides training: to stop, and to hold for a debugger."""

from __future__ import annotations

import contextlib
import sys

from paceline.errors import ConfigError
from paceline.hang.rank_report import DEBUGGED, WAITS_FOR_DEBUGGER
from paceline.train.debugger import Debugger, check_rank
from paceline.train.run_evaluation import RunEvaluation


class RunControls(RunEvaluation):
    """The part of a run that stops and holds it."""

    _debugger: Debugger | None = None

    def stop(self, reason: str) -> None:
        """Save after this step or the next one and exit with code 75, to be resumed. One rank is enough to ask.

        - `reason`: why, for the report.

        >>> with contextlib.suppress(SystemExit), paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps(torch.randn(512, 4), epochs=100):
        ...         run.stop("the machine is needed elsewhere")
        """
        if self._loop is None:
            raise ConfigError(
                f"run.stop({reason!r}) was called before the loop, when there is nothing to save",
                fix="call it inside of `for step in run.steps(...)`, or leave the script with sys.exit",
            )
        self._loop.request_stop(reason)

    def breakpoint(self, rank: int = 0) -> None:
        """Open pdb here on one rank. Every rank must call this, in the body of the loop.

        - `rank`: the rank whose variables you want to see.

        The others wait; no time-out and no watchdog ends that. Type c to continue.

        >>> def look(run, losses):
        ...     if float(losses) > 100:  # the same on every rank
        ...         run.breakpoint(rank=1)
        """
        check_rank(rank, self.world)
        if self._debugger is None:
            self._debugger = Debugger(self.world)
        doing = DEBUGGED if self.world.rank == rank else WAITS_FOR_DEBUGGER
        with contextlib.ExitStack() as stack:
            if self._loop is not None:
                stack.enter_context(self._loop.hold(doing))
            self._debugger.hold(rank, sys._getframe(1))  # noqa: SLF001 - the caller's, as pdb.set_trace does
