"""How replicas take steps apart and then meet (DiLoCo): fewer bytes, and the same bits on any number of ranks.

Replicas, not ranks, make the training: each has its lanes, its weights and what its optimizer remembers. A rank runs its
share of them in turn. When they meet, the outer optimizer moves the common weights along the mean of their ways,
and all set out from there. Between two steps model and optimizer hold what is common: the weights of the last
meeting, which are evaluated and exported, and what the outer optimizer remembers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import RankBatch
from paceline.errors import ConfigError
from paceline.scale.batch import StepPlan, share
from paceline.train.lane_sum import Note, RankRequests, drop_gradients
from paceline.train.optimizer_step import LossFunction, OptimizerStep
from paceline.train.outer_gradient import OuterGradient
from paceline.train.state import Slots, load_state, load_weight, named_state, python_numbers
from paceline.world.collectives import sum_across
from paceline.world.world import World

_PART = "replica"
_GRID = 2.0**20
"""Losses are rounded to multiples of its inverse: so their sums are exact, in whatever order ranks and steps are added."""


class Replica(NamedTuple):
    """A copy of the weights that walks by itself, and what its optimizer remembers."""

    number: int
    weights: list[Tensor]
    memory: Any


class _Place(NamedTuple):
    """Where saved tensors of a replica go."""

    weights: dict[str, Tensor]
    """Those that have not come yet."""
    slots: Slots

    def load(self, full_name: str, value: Tensor, numbers: Mapping[str, str]) -> list[str]:
        """Put one tensor in its place; return what does not fit."""
        part, _, name = full_name.partition(".")
        if part == "model":
            problems = load_weight(self.weights, name, value)
            self.weights.pop(name, None)
            return problems
        kind, _, name = name.partition(".")
        return self.slots.load(kind, name, value, numbers.get(full_name))


class DilocoStep(OptimizerStep):
    """A step of every replica, each on its lanes; after `local_sgd.steps` of them, at the end of an epoch and of the run, they meet."""

    _walks_apart = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        config: RunConfig,
        total_samples: int = 0,
    ) -> None:
        super().__init__(world, model, optimizer, loss, config, total_samples)
        self._names = [
            name for name, value in self._inner.named_parameters() if value.requires_grad
        ]
        settings = config.local_sgd
        momentum = settings.outer_momentum
        self._outer = torch.optim.SGD(
            self._trainable, settings.outer_lr, momentum, nesterov=momentum > 0
        )
        self._common = Replica(-1, [value.data for value in self._trainable], self._outer.state)
        self._replicas = [
            Replica(
                number, [value.clone() for value in self._common.weights], _copied(optimizer.state)
            )
            for number in share(settings.replicas, world.rank, world.size)
        ]
        self._mean_way = OuterGradient(world, config)
        self._apart = False
        self._seat(self._common)

    def __call__(self, step: RankBatch, asks: Callable[[], RankRequests] | None = None) -> Note:
        """Let this rank's replicas take a step, one after the other; where all meet after it, meet."""
        if self._buffers is None:
            self._buffers = self._find_buffers(step)
            if self._buffers.any:
                raise _moving_buffers()
        total = Note(0.0, 0.0)
        for replica, part in zip(self._replicas, self._parts(step), strict=True):
            if part.plan.samples:  # a short last step may leave nothing for a replica: it rests
                with self._turn_of(replica):
                    note = super().__call__(part)
                total = total.plus(note._replace(loss=round(float(note.loss) * _GRID) / _GRID))
        if asks is not None:
            total = total.asking(asks())
        self.met = self._meets_after(step.plan)
        self._apart = not self.met
        if self.met:
            with self.clock.waiting():
                self._meet()
        return total

    @property
    def knows_all(self) -> bool:
        """Whether a step's note is the sum over all ranks: only if there is no other."""
        return self._world.size == 1

    def total(self, note: Note) -> Note:
        """Return the sum of a note over all ranks. Every rank must call this."""
        with self.clock.waiting():
            return Note.from_tensor(sum_across(self._world, note.to_tensor()))

    def own_state(self) -> Mapping[str, Tensor]:
        """Return what this rank's replicas hold: their optimizers' state and, where they are apart, their weights."""
        return dict(self._own_state())

    def _own_state(self) -> Iterator[tuple[str, Tensor]]:
        for replica in self._replicas:
            start = f"{_PART}.{replica.number:04d}"
            if self._apart:
                yield from (
                    (f"{start}.model.{name}", value)
                    for name, value in zip(self._names, replica.weights, strict=True)
                )
            with self._turn_of(replica):
                state = dict(named_state(self._model, self._optimizer))
            yield from (
                (f"{start}.{name}", value)
                for name, value in state.items()
                if name.startswith("optimizer.")
            )

    def numbers(self) -> dict[str, str]:
        """Return which entries are Python numbers: in all replicas the same."""
        with self._turn_of(self._replicas[0]):
            return python_numbers(self._optimizer, self._model)

    def load(self, saved: Iterable[tuple[str, Tensor]], numbers: Mapping[str, str]) -> list[str]:
        """Go on from saved tensors, those of other ranks' replicas left out; return what does not fit."""
        places = {f"{replica.number:04d}": self._place_of(replica) for replica in self._replicas}
        self._apart = False
        problems: list[str] = []

        def common() -> Iterator[tuple[str, Tensor]]:
            for full_name, value in saved:
                part, _, rest = full_name.partition(".")
                if part != _PART:
                    yield full_name, value
                    continue
                number, _, name = rest.partition(".")
                self._apart = self._apart or name.startswith("model.")
                if number in places:
                    problems.extend(places[number].load(name, value, numbers))

        problems += load_state(self._model, self._outer, common(), {})
        if not self._apart:
            self._set_out()
            return problems
        return problems + [
            f"{name} of replica {number} was not saved"
            for number, place in places.items()
            for name in place.weights
        ]

    def _place_of(self, replica: Replica) -> _Place:
        """Return where saved tensors of a replica go."""
        replica.memory.clear()
        with self._turn_of(replica):
            return _Place(
                dict(zip(self._names, replica.weights, strict=True)),
                Slots(self._model, self._optimizer),
            )

    def _parts(self, step: RankBatch) -> Iterator[RankBatch]:
        """Yield the step of each of this rank's replicas: its lanes, which are all the samples that it knows of."""
        each = self._config.batch.lanes // self._config.local_sgd.replicas
        for start in range(0, len(step.lanes), each):
            lanes = step.lanes[start : start + each]
            samples = sum(lane.samples for lane in lanes)
            yield RankBatch(replace(step.plan, samples=samples), lanes)

    def _meets_after(self, plan: StepPlan) -> bool:
        last = plan.ends_epoch or plan.seen == self._total_samples
        return last or (plan.within + 1) % self._config.local_sgd.steps == 0

    def _meet(self) -> None:
        """Move the common weights along the mean way of all replicas, and set out from there. Every rank must call this."""
        ways = self._mean_way(self._common.weights, [replica.weights for replica in self._replicas])
        for parameter, way in zip(self._trainable, ways, strict=True):
            parameter.grad = way
        self._outer.step()
        drop_gradients(self._trainable)
        self._set_out()

    def _set_out(self) -> None:
        for replica in self._replicas:
            torch._foreach_copy_(replica.weights, self._common.weights)

    @contextlib.contextmanager
    def _turn_of(self, replica: Replica) -> Iterator[None]:
        """Let model and optimizer be those of a replica for a while."""
        self._seat(replica)
        try:
            yield
        finally:
            self._seat(self._common)

    def _seat(self, replica: Replica) -> None:
        for parameter, value in zip(self._trainable, replica.weights, strict=True):
            parameter.data = value
        self._optimizer.state = replica.memory


def _copied(memory: Mapping[Tensor, Mapping[str, Any]]) -> defaultdict[Tensor, dict[str, Any]]:
    """Return what an optimizer remembers as another one's own."""
    found: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for parameter, state in memory.items():
        found[parameter] = {
            kind: value.clone() if isinstance(value, Tensor) else value
            for kind, value in state.items()
        }
    return found


def _moving_buffers() -> ConfigError:
    return ConfigError(
        "forward changes buffers (such as BatchNorm's), which replicas that walk apart cannot share",
        fix="take a norm without statistics, such as LayerNorm or GroupNorm, or set local_sgd.steps=0",
    )
