"""Local SGD (DiLoCo): replicas train independently and synchronize every `local_sgd.steps` steps.

The number of replicas, not of ranks, defines the training: each replica has its own lanes, weights and optimizer
state, so the bits are the same on any number of ranks. A rank runs its share of the replicas one after the other.
To synchronize, the outer optimizer moves the common weights along the outer gradient, and every replica restarts
from there. Between two steps the model holds the common weights (which are evaluated and exported), and the
optimizer holds the state of the outer optimizer.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.batches import RankBatch
from paceline.errors import ConfigError
from paceline.exact.buckets import BucketedSum
from paceline.exact.buffers import MovingBuffers
from paceline.exact.exchange import TreeShape, choose_exchange
from paceline.exact.lanes import UpdateCall
from paceline.exact.loss import Losses, LossesOfReplicas
from paceline.exact.optimizer import GradientSum
from paceline.exact.row import RankRequests, Rows, StepSums
from paceline.exact.state import (
    OptimizerSlots,
    load_state,
    load_weight,
    named_state,
    python_numbers,
)
from paceline.exact.step import Updates
from paceline.scale.batch import StepPlan, share
from paceline.scale.tree import merges_after
from paceline.world.collectives import wire_device
from paceline.world.world import World

_PREFIX = "replica"
_GRID = 2.0**20
"""Losses are rounded to multiples of 1 / _GRID, so that their sums are exact in any order of ranks and steps."""


class Replica(NamedTuple):
    """A copy of the weights with its own optimizer state."""

    number: int
    weights: list[Tensor]
    optimizer_state: Any


class _ReplicaLoader(NamedTuple):
    """Restores the saved tensors of one replica."""

    missing: dict[str, Tensor]
    """Weights that have not been loaded yet."""
    slots: OptimizerSlots

    def load(self, full_name: str, value: Tensor, numbers: Mapping[str, str]) -> list[str]:
        """Copy one tensor; return a line if it does not match."""
        part, _, name = full_name.partition(".")
        if part == "model":
            problems = load_weight(self.missing, name, value)
            self.missing.pop(name, None)
            return problems
        kind, _, name = name.partition(".")
        return self.slots.load(kind, name, value, numbers.get(full_name))


class ReplicaUpdates(Updates):
    """One update of every replica; synchronizes every `local_sgd.steps` steps and at the end of an epoch and of the run."""

    def _set_up(self) -> None:
        # A rank asks once per step, after all of its replicas.
        self._own_requests, self._get_requests = self._get_requests, RankRequests
        if len(self.models) > 1 or len(self._optimizers) > 1:
            raise ConfigError(
                f"local SGD trains one model with one optimizer; this run has {len(self.models)} and {len(self._optimizers)}",
                fix="set local_sgd.steps=0",
            )
        settings, self._model = self.config.local_sgd, self.models[0]
        self._optimizer, updates = next(iter(self._optimizers.items()))
        self._trainable = updates.parameters
        names = {value: name for name, value in self._model.named_parameters()}
        self._names = [names[value] for value in self._trainable]
        momentum = settings.outer_momentum
        self._outer = torch.optim.SGD(
            self._trainable, settings.outer_lr, momentum, nesterov=momentum > 0
        )
        self._common = Replica(-1, [value.data for value in self._trainable], self._outer.state)
        self._replicas = []
        for number in share(settings.replicas, self.world.rank, self.world.size):
            weights = [value.clone() for value in self._common.weights]
            self._replicas.append(Replica(number, weights, _clone_state(self._optimizer.state)))
        self._outer_gradient = OuterGradient(self.world, self.config)
        self._diverged = False
        """Whether replicas have weights other than the common ones."""
        self._swap_in(self._common)

    @property
    def _alone(self) -> World:
        """This rank as a world of its own: a replica adds nothing over ranks."""
        return replace(self.world, rank=0, size=1)

    def _make_buffers(self, rules: Sequence[Mapping[str, str]]) -> MovingBuffers:
        if any(rule != "mean" for each in rules for rule in each.values()):
            raise ConfigError(
                "run.model(model, buffers=...) does not support local SGD: replicas cannot share buffers that forward changes",
                fix="remove buffers=, and let forward change no buffers; or set local_sgd.steps=0",
            )
        return MovingBuffers(self.models, max(2, self.config.batch.lanes), self._alone, None)

    def _make_sum(self, parameters: list[nn.Parameter]) -> GradientSum:
        lanes = self.config.batch.lanes // self.config.local_sgd.replicas
        return BucketedSum(parameters, lanes, self._alone, self.clock, exact=True)

    def update(self, call: UpdateCall) -> tuple[Losses, StepSums]:
        """Run one update of each replica of this rank; synchronize all replicas if it is time."""
        if call.over_batch is not None:
            raise ConfigError(
                "over_batch= does not support local SGD: a replica sees its own samples only",
                fix="set local_sgd.steps=0",
            )
        total = StepSums()
        for replica, part in zip(self._replicas, self._parts(call.step), strict=True):
            if part.plan.samples:  # a short last step may have no samples for a replica
                with self._active(replica):
                    _, sums = super().update(call._replace(step=part))
                loss = round(float(sums.loss) * _GRID) / _GRID
                total = total.plus(StepSums(loss, sums.counted))
        total = total.with_requests(self._own_requests())
        self.synchronized = self._synchronizes_after(call.step.plan)
        self._diverged = not self.synchronized
        if self.synchronized:
            with self.clock.waiting():
                self._synchronize()
        return LossesOfReplicas(), total

    def read(self, call: UpdateCall, rows: Rows, total: Tensor) -> list[float]:
        """Read the sums of a replica, whose forward must not change buffers."""
        numbers = super().read(call, rows, total)
        if numbers[rows.layout.buffer] or bool(total[rows.layout.head :].any()):
            raise _moving_buffers()
        return numbers

    def refuse_backward(self) -> None:
        """Raise: a replica changes its weights before the next one begins."""
        raise ConfigError(
            f"run.backward does not support local_sgd.steps={self.config.local_sgd.steps}",
            fix="call run.update, or set local_sgd.steps=0",
        )

    @property
    def totals_are_global(self) -> bool:
        """Whether notes are summed over all ranks: only in a world of one."""
        return self.world.size == 1

    def own_state(self) -> Mapping[str, Tensor]:
        """Return the optimizer state of this rank's replicas and, between synchronizations, their weights."""
        return dict(self._own_state())

    def _own_state(self) -> Iterator[tuple[str, Tensor]]:
        for replica in self._replicas:
            prefix = f"{_PREFIX}.{replica.number:04d}"
            if self._diverged:
                for name, value in zip(self._names, replica.weights, strict=True):
                    yield f"{prefix}.model.{name}", value
            with self._active(replica):
                state = dict(named_state(self._model, self._optimizer))
            for name, value in state.items():
                if name.startswith("optimizer."):
                    yield f"{prefix}.{name}", value

    def numbers(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Return the entries of the optimizer's state that are Python numbers: the same for all replicas."""
        with self._active(self._replicas[0]):
            return python_numbers(optimizer, model)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Iterator[tuple[str, Tensor]],
        numbers: Mapping[str, str],
        is_saved: Callable[[str], bool],
    ) -> list[str]:
        """Restore saved tensors, except those of other ranks' replicas; return a line for each mismatch."""
        loaders = {f"{replica.number:04d}": self._loader(replica) for replica in self._replicas}
        self._diverged = False
        problems: list[str] = []

        def common() -> Iterator[tuple[str, Tensor]]:
            for full_name, value in self._take_buffers(saved):
                part, _, rest = full_name.partition(".")
                if part != _PREFIX:
                    yield full_name, value
                    continue
                number, _, name = rest.partition(".")
                self._diverged = self._diverged or name.startswith("model.")
                if number in loaders:
                    problems.extend(loaders[number].load(name, value, numbers))

        problems += load_state(model, self._outer, common(), {}, is_saved)
        if not self._diverged:
            self._reset_replicas()
            return problems
        for number, loader in loaders.items():
            problems += [f"{name} of replica {number} was not saved" for name in loader.missing]
        return problems

    def _loader(self, replica: Replica) -> _ReplicaLoader:
        replica.optimizer_state.clear()
        weights = dict(zip(self._names, replica.weights, strict=True))
        with self._active(replica):
            return _ReplicaLoader(weights, OptimizerSlots(self._model, self._optimizer))

    def _parts(self, step: RankBatch) -> Iterator[RankBatch]:
        """Yield the step of each replica of this rank, as if its lanes were the whole batch."""
        lanes_each = self.config.batch.lanes // self.config.local_sgd.replicas
        for start in range(0, len(step.lanes), lanes_each):
            lanes = step.lanes[start : start + lanes_each]
            samples = sum(lane.samples for lane in lanes)
            yield RankBatch(replace(step.plan, samples=samples), lanes)

    def _synchronizes_after(self, plan: StepPlan) -> bool:
        is_last = plan.ends_epoch or plan.seen == self._total_samples
        return is_last or (plan.within + 1) % self.config.local_sgd.steps == 0

    def _synchronize(self) -> None:
        """Move the common weights by an outer step and copy them to all replicas. Every rank must call this."""
        weights = [replica.weights for replica in self._replicas]
        gradients = self._outer_gradient(self._common.weights, weights)
        for parameter, gradient in zip(self._trainable, gradients, strict=True):
            parameter.grad = gradient
        self._outer.step()
        for parameter in self._trainable:
            parameter.grad = None
        self._reset_replicas()

    def _reset_replicas(self) -> None:
        for replica in self._replicas:
            torch._foreach_copy_(replica.weights, self._common.weights)

    @contextlib.contextmanager
    def _active(self, replica: Replica) -> Iterator[None]:
        """Give model and optimizer the weights and state of a replica for a while."""
        self._swap_in(replica)
        try:
            yield
        finally:
            self._swap_in(self._common)

    def _swap_in(self, replica: Replica) -> None:
        for parameter, value in zip(self._trainable, replica.weights, strict=True):
            parameter.data = value
        self._optimizer.state = replica.optimizer_state


def _clone_state(
    optimizer_state: Mapping[Tensor, Mapping[str, Any]],
) -> defaultdict[Tensor, dict[str, Any]]:
    copies: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for parameter, state in optimizer_state.items():
        if not isinstance(state, Mapping):  # a number under a word
            copies[parameter] = state.clone() if isinstance(state, Tensor) else state
            continue
        copy = copies[parameter]
        for kind, value in state.items():
            copy[kind] = value.clone() if isinstance(value, Tensor) else value
    return copies


def _moving_buffers() -> ConfigError:
    return ConfigError(
        "forward changes buffers (such as BatchNorm's), which local SGD replicas cannot share",
        fix="use a norm without running statistics, such as LayerNorm or GroupNorm, or set local_sgd.steps=0",
    )


# Outer gradient of local SGD: mean of (start - weights) over all replicas, reduced in a fixed order.


_BUCKET_BYTES = 32 << 20  # an exchange holds a few copies of its bucket
_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OuterGradient:
    """Computes the outer gradient, with the same bits in any world. All ranks must call it together.

    With compression each difference is rounded before it is sent, and so is every sum of the tree, in a
    world of one as well.
    """

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._replicas = world, config.local_sgd.replicas
        self._dtype = _COMPRESSED.get(config.compression)
        self._merges = merges_after(share(self._replicas, world.rank, world.size), self._replicas)
        self._shape = TreeShape.of(self._replicas, world)

    def __call__(self, start: list[Tensor], replicas: list[list[Tensor]]) -> list[Tensor]:
        """Return the outer gradient of each weight, from the common start and this rank's replicas."""
        gradients: list[Tensor] = []
        for bucket in buckets(start):
            differences = (self._difference(start[bucket], weights[bucket]) for weights in replicas)
            mean = self._sum(differences).to(start[bucket][0].dtype).div_(self._replicas)
            pieces = torch.split(mean, [value.numel() for value in start[bucket]])
            for piece, value in zip(pieces, start[bucket], strict=True):
                gradients.append(piece.view_as(value))
        return gradients

    def _difference(self, start: list[Tensor], weights: list[Tensor]) -> Tensor:
        pairs = zip(start, weights, strict=True)
        flat = torch.cat([(before - after).flatten() for before, after in pairs])
        return flat if self._dtype is None else flat.to(self._dtype)

    def _sum(self, differences: Iterable[Tensor]) -> Tensor:
        """Add this rank's replicas as far as they form whole subtrees, and the rest across ranks."""
        sums: list[Tensor] = []
        for difference, merges in zip(differences, self._merges, strict=True):
            sums.append(difference)
            for _ in range(merges):
                newest = sums.pop()
                sums[-1].add_(newest)
        if self._world.size == 1:
            return sums[0]
        total = torch.empty_like(sums[0])
        exchange = choose_exchange(total, 0, self._shape, wire_device(self._world))
        exchange.start(sums, [])
        while not exchange.advance(total):
            pass
        return total


def buckets(values: list[Tensor]) -> Iterator[slice]:
    """Yield slices of neighbours to send together: one dtype, and at most `_BUCKET_BYTES` unless one tensor is larger."""
    begin = size = 0
    for end, value in enumerate(values):
        is_full = size + value.nbytes > _BUCKET_BYTES or value.dtype != values[begin].dtype
        if end > begin and is_full:
            yield slice(begin, end)
            begin, size = end, 0
        size += value.nbytes
    yield slice(begin, len(values))
