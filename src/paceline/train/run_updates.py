"""The updates of a run: the gradients of all lanes of all ranks, and one change of the weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline import terminal
from paceline.errors import ConfigError, TrainingError
from paceline.exact.lanes import UpdateCall
from paceline.exact.loss import Losses, LossFunction
from paceline.exact.row import StepSums
from paceline.train.carried import numbers_around
from paceline.train.likely_mistakes import refuse_other_call
from paceline.train.run_controls import RunControls
from paceline.train.run_loop import RunLoop
from paceline.train.run_step import Step, with_requests_of
from paceline.train.saving.checkpointing import shorten
from paceline.train.saving.module_values import ForwardChanges
from paceline.train.script_steps import ScriptSteps
from paceline.train.unusual_calls import UnusualCalls
from paceline.world.collectives import all_gather_texts
from paceline.world.randomness import seed_everything

_KEEP_IN_MODEL = (
    "if a loss depends on it, make it a buffer (register_buffer) or compute it from step.index"
)
_KEEP_IN_LOOP = (
    "return such values from the loss, and keep what you compute of them in the loop, in an object with state_dict "
    "that run.track saves"
)
_UPDATES_TO_WATCH = 2
"""Updates of each start in which the numbers of modules are compared before and after."""


class RunUpdates(RunControls):
    """The part of a run that trains."""

    _named_changes: set[str]

    _step: Step | None = None
    _sums: StepSums | None = None
    _updates = 0
    """Updates of the current step so far."""
    _most_updates = 0
    """The most updates that a step of this start has had."""
    _first_updates = 0
    """Updates of this start, as far as they are watched."""
    _failed = ""
    """The error that has left an update."""
    _script_steps: ScriptSteps
    _unusual: UnusualCalls

    @refuse_other_call("run.update(optimizer, loss, step), where loss is a function of a batch")
    def update(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        clip: float | None = None,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Add the gradients of all samples of the step, clip them, and change the weights of one optimizer.

        - `optimizer`: the optimizer whose parameters get gradients; others keep theirs.
        - `loss`: `loss(batch)` is called once per micro-batch (lane). It returns the mean over its samples, (sum, count), or
          a dict with the key "loss" and other values.
        - `step`: the step that `run.steps` gave last.
        - `clip`: the largest norm of the gradients; None: `clip_norm` of the config.
        - `over_batch`: for a loss over all samples of the step, such as a contrastive one: `loss` then returns one row
          per sample, and `over_batch(rows)` is the loss over the rows of all ranks.

        It returns the means over all samples: `float(found)` is the loss, `found["size"]` another value. Every rank must
        call this.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     def loss(batch):
        ...         return {"loss": model(batch[0]).square().mean(), "size": 3.0}
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.update(optimizer, loss, step, clip=1.0)
        >>> found["size"]
        3.0
        """
        loop, norm = self._running(), self.config.clip_norm
        if clip is not None:
            norm = clip
            loop.by_script.note(loop.done, "clip_norm", clip, "clip= of run.update")
        return self._run(loop.updates.update, optimizer, loss, step, norm, over_batch)

    @refuse_other_call("run.backward(optimizer, loss, step), where loss is a function of a batch")
    def backward(
        self,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        *,
        over_batch: Callable[[Tensor], Tensor] | None = None,
    ) -> Losses:
        """Leave the gradients of all samples of the step in `grad`: `update` without clipping and stepping.

        - `optimizer`: the optimizer whose parameters get gradients.
        - `loss`: as for `update`.
        - `step`: the step that `run.steps` gave last.
        - `over_batch`: as for `update`.

        >>> with paceline.Run(config) as run:
        ...     model = run.model(torch.nn.Linear(4, 1))
        ...     optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for step in run.steps((torch.randn(512, 4),), epochs=1):
        ...         found = run.backward(optimizer, lambda batch: model(batch[0]).mean(), step)
        ...         torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        ...         optimizer.step()
        >>> model.weight.grad.shape
        torch.Size([1, 4])
        """
        loop = self._running()
        loop.updates.refuse_backward()
        loop.by_script.note(
            loop.done, "clip_norm", "chosen", "the script, which calls run.backward"
        )
        found = self._run(loop.updates.backward, optimizer, loss, step, 0.0, over_batch)
        self._script_steps.watch(after="run.backward", of=optimizer)
        return found

    def _run(
        self,
        function: Callable[[UpdateCall], tuple[Losses, StepSums]],
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        step: Step,
        clip_norm: float,
        over_batch: Callable[[Tensor], Tensor] | None,
    ) -> Losses:
        _check_arguments(optimizer, loss)
        self._check_current(step)
        batch = step._batch  # noqa: SLF001 - the run made it
        number, self._updates = self._updates, self._updates + 1
        name = f"run.{function.__name__}"
        self._unusual.update(name, sys._getframe(3))  # noqa: SLF001 - the line of the script
        if number >= max(1, self._most_updates):
            self._agree_on_update(number, batch.plan.index)
        self._most_updates = max(self._most_updates, number + 1)
        call = UpdateCall(optimizer, loss, batch, number, clip_norm, over_batch)
        self._script_steps.refuse_changed_gradients()
        self._script_steps.ignore()  # the run steps now; and torch.compile must not find a hook
        is_new = self._first_updates < _UPDATES_TO_WATCH
        watched = ForwardChanges(self._parts.model) if is_new else None
        numbers = numbers_around(loss) if is_new else {}
        with self._poisoning():
            losses, sums = function(call)
        if watched is not None:
            self._first_updates += 1
            self._name_changes("forward", watched.names(), _KEEP_IN_MODEL)
            # Only the loss can have changed these: it alone has run in between.
            now = numbers_around(loss)
            changed = [name for name in numbers if numbers[name] != now.get(name)]
            self._name_changes("the loss", changed, _KEEP_IN_LOOP)
        self._script_steps.watch(after="run.update", of=optimizer)
        seed_everything(self.config.seed, batch.plan.index, -1 - number)
        self._sums = sums if self._sums is None else with_requests_of(self._sums, sums)
        return losses

    def _agree_on_update(self, number: int, step: int) -> None:
        """Raise unless all ranks take one update more than in any step before. Every rank must call this.

        Else the ranks that do not would add their next step to the update of those that do, without an error.
        """
        texts = all_gather_texts(self.world, f"update {number + 1} of step {step + 1}")
        if len({*texts}) > 1:
            raise TrainingError(
                f"the ranks do not take the same updates: {'; '.join(dict.fromkeys(texts))}",
                fix="call run.update equally often on every rank",
            )

    def _name_changes(self, who: str, names: list[str], fix: str) -> None:
        """Name, once each, numbers that forward or the loss has changed."""
        new = [name for name in names if name not in self._named_changes]
        self._named_changes.update(new)
        if new and self.is_main:
            terminal.error(
                f"warning: {who} changes {shorten(new)}. Each rank does so for its own lanes, and no checkpoint holds it\n"
                f"  fix: {fix}"
            )

    def _check_current(self, step: Step) -> None:
        if self._failed:
            raise TrainingError(
                f"an earlier update of this run failed: {self._failed}",
                fix="let the error end the run; the same command resumes from the newest checkpoint",
            )
        if not isinstance(step, Step):
            raise ConfigError(
                f"the third argument of run.update must be the step, got a {type(step).__name__}",
                fix="loop by `for step in run.steps(...)`, and call run.update(optimizer, loss, step); step.index counts",
            )
        if step is not self._step:
            raise ConfigError(
                f"step {step.index} is over",
                fix="use the step that `for step in run.steps(...)` gave last",
            )

    @contextlib.contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Let no update follow one that has failed: the ranks may differ."""
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise

    def _running(self) -> RunLoop:
        if self._loop is None:
            raise ConfigError(
                "the run has no loop yet", fix="call this inside of `for step in run.steps(...)`"
            )
        return self._loop


def _check_arguments(optimizer: object, loss: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the first argument of run.update must be an optimizer, got {_kind(optimizer)}",
            fix="call run.update(optimizer, loss, step)",
        )
    if not callable(loss):
        raise ConfigError(
            f"the loss must be a function of a batch, got {_kind(loss)}",
            fix="pass a function: run.update(optimizer, lambda batch: cross_entropy(model(batch[0]), batch[1]), step)",
        )


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
