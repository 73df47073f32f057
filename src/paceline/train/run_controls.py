"""What user code asks of a run besides training: to stop, and to hold for a debugger."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.train.run_evaluation import RunEvaluation


class RunControls(RunEvaluation):
    """The part of a run that stops and holds it."""

    def stop(self, reason: str) -> None:
        """Save after this step or the next one and exit with code 75, to be resumed. One rank is enough to ask."""
        if self._loop is None:
            raise ConfigError(
                f"run.stop({reason!r}) was called before the loop, when there is nothing to save",
                fix="call it inside of `for step in run.steps(...)`, or leave the script with sys.exit",
            )
        self._loop.request_stop(reason)
