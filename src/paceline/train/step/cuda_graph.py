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
from paceline.train.gradients.note import Note, RankRequests
from paceline.train.step.captured_update import CapturedUpdate, CaptureParts
from paceline.train.step.lane_loss import Losses
from paceline.train.step.updates import UpdateCall, Updates
from paceline.train.strategy import Strategy
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_EAGER_UPDATES = 2  # the first creates the optimizer's state, the second may compile its update
_MEETS_UNTIL = 64
_COMPARES_EVERY = 1024
_MAX_REASON_LETTERS = 400
_MAX_FUNCTIONS = 16
"""Losses of the same code, such as a lambda in the loop, after which capturing is given up."""
_NOT_YET, _READY, _CAPTURED, _OBSTACLE = "not yet", "ready", "captured", "obstacle: "
"""What a rank tells the others about an update."""
_Key = tuple[Any, ...]
"""What an update must share with a captured one: optimizer, loss, clipping, modes, and the shape of its batch."""


def meets(number: int) -> bool:
    """Return whether ranks tell each other, in the update of this number of its kind, what they have captured.

    >>> [number for number in range(300) if meets(number)] == [*range(2, 65), 128, 192, 256]
    True
    """
    return _EAGER_UPDATES <= number <= _MEETS_UNTIL or number % _MEETS_UNTIL == 0 != number


def compares(number: int) -> bool:
    """Return whether the captured update of this number is compared with an eager one: often at first, seldom later.

    >>> [number for number in range(2100) if compares(number)]
    [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    """
    is_power = number >= _EAGER_UPDATES and not number & (number - 1)
    return is_power or number % _COMPARES_EVERY == 0 != number


class CapturedUpdates(Updates):
    """Updates with the bits of `Updates`. The third update of each kind is captured."""

    def _set_up(self) -> None:
        self._numbers: Counter[_Key] = Counter()
        self._seen: Counter[_Key] = Counter()
        self._captured: dict[_Key, CapturedUpdate] = {}
        self._functions: dict[Any, set[Any]] = {}
        pool = torch.cuda.graph_pool_handle()
        self._parts = CaptureParts(self._world, self._config, self._models, self._buffers, pool)
        self._modules = [module for model in self._models for module in model.modules()]
        self._gave_up = False

    def update(self, call: UpdateCall) -> tuple[Losses, Note]:
        """Run an update: replayed if one like it was captured."""
        updates = self.of(call.optimizer)
        updates.follow_freezing()
        if self._gave_up:
            return super().update(call)
        key = self._key_of(call, updates.selections)
        kind = self._kind_of(call)
        is_compared = self._meet(call, key, self._numbers[kind])
        self._numbers[kind] += 1
        self._count(call, key)
        captured = self._captured.get(key)
        if captured is None or self._gave_up:
            return super().update(call)
        requests = self._get_requests()
        if is_compared and not self._is_like_eager(captured, call, requests):
            return super().update(call)
        self.ready = time.perf_counter()
        if is_compared:
            return captured.finish(call, requests)
        return captured.replay(call, requests)

    def close(self) -> None:
        """Free all graphs: NCCL waits for those with collectives before it lets a rank leave."""
        for captured in self._captured.values():
            captured.close()

    def _kind_of(self, call: UpdateCall) -> _Key:
        """Return what all ranks know of an update: they count updates of a kind alike."""
        optimizer = list(self._optimizers).index(call.optimizer)
        return optimizer, call.number, call.clip_norm, call.step.plan.samples

    def _key_of(self, call: UpdateCall, selections: int) -> _Key:
        modes = tuple(module.training for module in self._modules)
        return (*_shape_of(call), selections, len(self._buffers.known), modes)

    def _count(self, call: UpdateCall, key: _Key) -> None:
        """Count updates like this one, and functions of the same code."""
        self._seen[key] += 1
        code = getattr(call.loss, "__code__", None)
        if code is not None and key not in self._captured:
            self._functions.setdefault(code, set()).add(call.loss)

    # What the ranks decide together

    def _meet(self, call: UpdateCall, key: _Key, number: int) -> bool:
        """Capture the update if all ranks can; return whether all have captured it, and compare it now."""
        is_alone = self._world.size == 1
        if is_alone and key in self._captured:
            return compares(number)
        if not is_alone and not meets(number):
            return False
        states = self._tell(self._state_of(call, key))
        reasons = [state for state in states if state.startswith(_OBSTACLE)]
        if reasons:
            self._give_up(reasons[0].removeprefix(_OBSTACLE))
            return False
        if all(state == _READY for state in states):
            reason = next(filter(None, self._tell(self._capture(call, key))), "")
            if reason:
                self._give_up(reason)
            return not reason
        return compares(number) and all(state == _CAPTURED for state in states)

    def _tell(self, text: str) -> list[str]:
        """Return the texts of all ranks. Every rank must call this."""
        with self.clock.waiting():
            return all_gather_texts(self._world, text)

    def _state_of(self, call: UpdateCall, key: _Key) -> str:
        if key in self._captured:
            return _CAPTURED
        functions = self._functions.get(getattr(call.loss, "__code__", None), ())
        if len(functions) > _MAX_FUNCTIONS:
            return f"{_OBSTACLE}the loss is a new function in every step; define it before the loop"
        if self._seen[key] < _EAGER_UPDATES:
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

    def _capture(self, call: UpdateCall, key: _Key) -> str:
        """Capture an update; return why that is impossible, or ""."""
        try:
            self._captured[key] = CapturedUpdate(self._parts, self.of(call.optimizer), call)
        except Exception as error:  # noqa: BLE001 - CUDA and user code raise anything
            text = error.problem if isinstance(error, PacelineError) else str(error)
            return " ".join(text.split())[:_MAX_REASON_LETTERS]
        return ""

    def _is_like_eager(
        self, captured: CapturedUpdate, call: UpdateCall, requests: RankRequests
    ) -> bool:
        """Replay the lanes, and compare them with eager ones; if they differ on a rank, all give up."""
        texts = self._tell(captured.difference(call, requests))
        for rank, text in enumerate(texts):
            if text:
                self._give_up(
                    f"the replayed step {call.step.plan.index + 1} differs from the eager one on rank {rank}: {text}. "
                    "Forward depends on what a CUDA graph cannot follow: Python's random numbers, a counter, "
                    "or a branch on the data"
                )
                return False
        return True

    def _give_up(self, reason: str) -> None:
        if self._config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {reason}",
                fix="remove that obstacle, or set capture=auto to train without CUDA graphs",
            )
        self._gave_up = True
        self.close()
        self._captured.clear()
        self._seen.clear()
        self._functions.clear()
        _print_reason(self._world, reason)


def _shape_of(call: UpdateCall) -> _Key:
    lanes = []
    for lane in call.step.lanes:
        shapes = [leaf.shape for leaf in leaves_of(lane.batch) if isinstance(leaf, Tensor)]
        lanes.append((lane.samples, tuple(shapes)))
    # The function itself, not its id, which another one may get later.
    return call.optimizer, call.loss, call.clip_norm, call.step.plan.samples, tuple(lanes)


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
