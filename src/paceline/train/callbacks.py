"""User code that a run calls at the same moments on every rank: `Run(config, callbacks=[...])`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, did_you_mean
from paceline.train.run_step import Step
from paceline.train.saving.tracked import Tracked

MOMENTS = (
    "run_start", "run_end", "epoch_start", "epoch_end", "step_start", "step_end", "evaluation_end", "save", "stop",
)  # fmt: skip
"""The methods of a callback."""


class Callback:
    """Base class: override the methods that you need. Every rank calls each of them at the same moment.

    They may call the methods of the run: `run.evaluate`, `run.log`, `run.save`, `run.finish`, `run.stop`. An exception
    ends the run, as one in the loop does. With `state_dict` and `load_state_dict`, a callback is saved and restored
    with the run.

    >>> class Patience(Callback):
    ...     best = 0.0
    ...     def evaluation_end(self, run, metrics):
    ...         if metrics["acc"] < self.best:
    ...             run.finish("the accuracy fell")
    ...         self.best = metrics["acc"]
    """

    # `run` is a paceline.Run, which imports this module.

    def run_start(self, run: Any) -> None:
        """Before the first step, after the newest checkpoint was restored."""

    def run_end(self, run: Any) -> None:
        """After the last save of a complete run; neither after a stop nor after a failure."""

    def epoch_start(self, run: Any, step: Step) -> None:
        """Before the first step of an epoch, and before its samples are read; not where a resumed run continues within one."""

    def epoch_end(self, run: Any, step: Step) -> None:
        """After the last step of an epoch, before it is reported."""

    def step_start(self, run: Any, step: Step) -> None:
        """Before the body of the loop."""

    def step_end(self, run: Any, step: Step) -> None:
        """After the body of the loop, before the step is reported and saved."""

    def evaluation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        """After `run.evaluate`, with what it returns."""

    def save(self, run: Any, steps: int) -> None:
        """Before a checkpoint after this many steps is saved; changes of tracked objects are part of it."""

    def stop(self, run: Any, reason: str) -> None:
        """After the last save of a run that was asked to stop, before it exits with code 75."""


class Callbacks:
    """The callbacks of a run."""

    def __init__(
        self,
        run: Any,
        callbacks: Sequence[Callback],
        poisoning: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._run, self._callbacks, self._poisoning = run, list(callbacks), poisoning
        for each in self._callbacks:
            _check(each)

    def track(self, tracked: Tracked) -> None:
        """Save and restore the callbacks that have a state."""
        names: dict[str, int] = {}
        for each in self._callbacks:
            if hasattr(each, "state_dict"):
                name = f"callback_{type(each).__name__}"
                names[name] = names.get(name, 0) + 1
                tracked.add(name if names[name] == 1 else f"{name}_{names[name]}", each)

    def call(self, moment: str, *arguments: Any) -> None:
        """Call one method of all callbacks; after an exception no update is possible."""
        if not self._callbacks:
            return
        with self._poisoning():
            for each in self._callbacks:
                getattr(each, moment)(self._run, *arguments)

    def end_step(self, step: Step, total_steps: int) -> None:
        """Announce the end of a step, and of the epoch that it may end."""
        self.call("step_end", step)
        if step.ends_epoch or step.index + 1 == total_steps:
            self.call("epoch_end", step)

    def save(self, steps: int) -> None:
        """Announce a save."""
        self.call("save", steps)

    def stop(self, reason: str) -> None:
        """Announce a stop."""
        self.call("stop", reason)


def _check(callback: object) -> None:
    """Refuse what is not a callback, and methods that nothing would call."""
    if not isinstance(callback, Callback):
        is_class = isinstance(callback, type)
        what = f"the class {callback.__name__}" if is_class else repr(callback)  # type: ignore[attr-defined]
        raise ConfigError(
            f"callbacks= has {what}, which is not a paceline.Callback object",
            fix="derive its class from paceline.Callback, and pass an object: callbacks=[Patience()]",
        )
    for name in dir(callback):
        if name.startswith("on_"):
            raise ConfigError(
                f"nothing calls {type(callback).__name__}.{name}: the methods of a paceline.Callback have no on_",
                fix=did_you_mean(name.removeprefix("on_"), MOMENTS),
            )
