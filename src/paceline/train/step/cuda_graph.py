"""Which updates are captured as CUDA graphs, and when a captured one is compared with an eager one.

All ranks capture in the same step, and compare in the same steps: an exchange of gradients may be part of the graph.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.reading.nest import leaves_of
from paceline.errors import ConfigError, PacelineError, TrainingError
from paceline.train.gradients.note import Note
from paceline.train.step.captured_update import CapturedUpdate
from paceline.train.step.lane_loss import Losses
from paceline.train.step.recorded_update import CaptureParts
from paceline.train.step.update_kinds import UpdateKind, UpdateKinds
from paceline.train.step.updates import UpdateCall, Updates
from paceline.train.strategy import Strategy
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_EAGER_UPDATES = 2  # the first creates the optimizer's state, the second may compile its update
_MEETS_UNTIL = 64
_COMPARES_EVERY = 8192  # a comparison takes as long as some 40 replays of a small step
_MAX_REASON_LETTERS = 400
_FOLLOWS = (
    "The step depends on what a CUDA graph cannot follow: Python's random numbers, a counter, "
    "or a branch on the data"
)
_NOT_YET, _READY, _CAPTURED, _OBSTACLE = "not yet", "ready", "captured", "obstacle: "
"""What a rank tells the others about an update."""
_Counted = tuple[Any, ...]
"""What all ranks know of an update: they count updates alike."""


def meets(number: int) -> bool:
    """Return whether ranks tell each other, in the update of this number of its kind, what they have captured.

    >>> [number for number in range(300) if meets(number)] == [*range(2, 65), 128, 192, 256]
    True
    """
    return _EAGER_UPDATES <= number <= _MEETS_UNTIL or number % _MEETS_UNTIL == 0 != number


def compares(number: int) -> bool:
    """Return whether the captured update of this number is compared with an eager one: often at first, seldom later.

    >>> [number for number in range(17_000) if compares(number)]
    [2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192, 16384]
    """
    is_power = number >= _EAGER_UPDATES and not number & (number - 1)
    is_fourth = number.bit_length() % 2 == 1
    early = is_power and (number <= _MEETS_UNTIL or is_fourth)
    return (early and number < _COMPARES_EVERY) or number % _COMPARES_EVERY == 0 != number


class CapturedUpdates(Updates):
    """Updates with the bits of `Updates`. The third update of each kind is captured."""

    def _set_up(self) -> None:
        self._numbers: Counter[_Counted] = Counter()
        self._captured: dict[UpdateKind, CapturedUpdate] = {}
        self._compared_at: dict[UpdateKind, int] = {}
        """The last step of each kind in which a replay had the bits of an eager update."""
        pool = torch.cuda.graph_pool_handle()
        self._parts = CaptureParts(self._world, self._config, self._models, self._buffers, pool)
        self._kinds = UpdateKinds([one for model in self._models for one in model.modules()])
        self._gave_up = False

    def update(self, call: UpdateCall) -> tuple[Losses, Note]:
        """Run an update: replayed if one like it was captured."""
        updates = self.of(call.optimizer)
        updates.follow_freezing()
        if self._gave_up:
            return super().update(call)
        kind = self._kinds.kind_of(call, updates.selections, len(self._buffers.known))
        counted = self._counted(call)
        is_compared = self._meet(call, kind, self._numbers[counted])
        self._numbers[counted] += 1
        captured = self._captured.get(kind)
        if captured is None or self._gave_up:
            self._kinds.count(call, kind)
            return super().update(call)
        if is_compared:
            return self._compare(captured, call, kind)
        self.ready = time.perf_counter()
        return captured.replay(call, self._get_requests())

    def close(self) -> None:
        """Free all graphs: NCCL waits for those with collectives before it lets a rank leave."""
        for captured in self._captured.values():
            captured.close()

    def _counted(self, call: UpdateCall) -> _Counted:
        optimizer = list(self._optimizers).index(call.optimizer)
        return optimizer, call.number, call.clip_norm, call.step.plan.samples

    # What the ranks decide together

    def _meet(self, call: UpdateCall, kind: UpdateKind, number: int) -> bool:
        """Capture the update if all ranks can; return whether all have captured it, and compare it now."""
        is_alone = self._world.size == 1
        if is_alone and kind in self._captured:
            return compares(number)
        if not is_alone and not meets(number):
            return False
        states = self._tell(self._state_of(call, kind))
        reasons = [state for state in states if state.startswith(_OBSTACLE)]
        if reasons:
            self._give_up(reasons[0].removeprefix(_OBSTACLE))
            return False
        if all(state == _READY for state in states):
            reason = next(filter(None, self._tell(self._capture(call, kind))), "")
            if reason:
                self._give_up(reason)
            return not reason
        return compares(number) and all(state == _CAPTURED for state in states)

    def _tell(self, text: str) -> list[str]:
        """Return the texts of all ranks. Every rank must call this."""
        with self.clock.waiting():
            return all_gather_texts(self._world, text)

    def _state_of(self, call: UpdateCall, kind: UpdateKind) -> str:
        if kind in self._captured:
            return _CAPTURED
        if reason := self._kinds.too_many(call):
            return f"{_OBSTACLE}{reason}"
        if self._kinds.seen(kind) < _EAGER_UPDATES:
            return _NOT_YET
        obstacle = self._obstacle(call)
        return f"{_OBSTACLE}{obstacle}" if obstacle else _READY

    def _obstacle(self, call: UpdateCall) -> str:
        """Return why this update cannot be captured, as far as that is known in advance."""
        leaves = [leaf for lane in call.step.lanes for leaf in leaves_of(lane.batch)]
        others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        is_complete = self.of(call.optimizer).sum.is_complete
        obstacles = {
            "the loss is over the whole batch, which other ranks must send first": call.over_batch,
            "with precision=fp16 the host must check every step for overflow; use precision=bf16": self._config.precision
            == "fp16",
            "some parameters got no gradient in the last step": not is_complete,
            f"the batch contains {', '.join(sorted(set(others)))}, not only tensors": others,
        }
        return next((reason for reason, is_given in obstacles.items() if is_given), "")

    def _capture(self, call: UpdateCall, kind: UpdateKind) -> str:
        """Capture an update; return why that is impossible, or ""."""
        try:
            self._captured[kind] = CapturedUpdate(self._parts, self.of(call.optimizer), call)
        except Exception as error:  # noqa: BLE001 - CUDA and user code raise anything
            text = error.problem if isinstance(error, PacelineError) else str(error)
            return " ".join(text.split())[:_MAX_REASON_LETTERS]
        return ""

    def _compare(
        self, captured: CapturedUpdate, call: UpdateCall, kind: UpdateKind
    ) -> tuple[Losses, Note]:
        """Run an update both ways. If they differ on a rank, all give up, and this update is eager."""
        requests = self._get_requests()
        if reason := self._difference(captured.difference(call, requests), call):
            self._end_capturing(kind, call, reason)
            return super().update(call)
        self.ready = time.perf_counter()
        found, text = captured.finish_compared(call, requests)
        if reason := self._difference(text, call):
            self._end_capturing(kind, call, reason)
        self._compared_at[kind] = call.step.plan.index + 1
        return found

    def _difference(self, text: str, call: UpdateCall) -> str:
        """Return the first difference that a rank has found; "" if none has. Every rank must call this."""
        for rank, found in enumerate(self._tell(text)):
            if found:
                step = call.step.plan.index + 1
                return (
                    f"the replayed step {step} differs from the eager one on rank {rank}: {found}"
                )
        return ""

    def _end_capturing(self, kind: UpdateKind, call: UpdateCall, reason: str) -> None:
        """Stop capturing. An exact run fails if earlier replays were not compared: its weights may be wrong."""
        since, reason = self._compared_at.get(kind), f"{reason}. {_FOLLOWS}"
        if since is not None and self._config.exact:
            raise TrainingError(
                f"{reason}. Replayed steps after step {since} were not compared, and may be wrong, too",
                fix=f"remove the checkpoints after step {since}, and resume with capture=false",
            )
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self._config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {reason}",
                fix="remove that obstacle, or set capture=auto to train without CUDA graphs",
            )
        self._gave_up = True
        self.close()
        self._captured.clear()
        _print_reason(self._world, reason)


def _not_capturable(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return why optimizers cannot be captured; empty if they can."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" not in group and not group.get("fused"):
                name = type(optimizer).__name__
                return f"{name} has no option capturable; use AdamW, or SGD with fused=True"
    return ""


def may_capture(
    world: World,
    config: RunConfig,
    strategy: Strategy,
    optimizers: Sequence[torch.optim.Optimizer],
) -> bool:
    """Return whether to try to capture updates; raise if capture=true is impossible, say why capture=auto is."""
    if config.capture == "true" and world.device == "cpu":
        raise ConfigError(
            "capture=true needs a GPU, but this run trains on cpu", fix="set capture=auto"
        )
    if not strategy.captures:
        return False
    reason = strategy.capture_obstacle or _not_capturable(optimizers)
    if reason and config.capture == "true":
        raise ConfigError(
            f"the step cannot be captured as a CUDA graph: {reason}",
            fix="use another optimizer, or set capture=auto",
        )
    if reason:
        _print_reason(world, reason)
    return not reason


def _print_reason(world: World, reason: str) -> None:
    if world.is_main:
        print(f"training without CUDA graphs: {reason}", file=sys.stderr, flush=True)
