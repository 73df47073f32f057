"""The updates of one optimizer: which of its parameters train now, the sum of their gradients, the change of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward as _run_backward

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.exact.loss_checks import LossChecks
from paceline.exact.precision import Precision
from paceline.exact.row import Layout, Rows
from paceline.exact.sharded_tensor import clip_sharded, is_sharded
from paceline.exact.strategy import Strategy
from paceline.world.world import World


class GradientSum(Protocol):
    """Adds the gradients and rows of all lanes of an update; the sum ends up in each parameter's `grad`."""

    extra_lanes: int
    """Extra lanes that this rank must run first, so that other ranks can gather its shards."""
    is_complete: bool
    """Whether every lane of every rank gave every parameter a gradient in the last update."""

    def begin(self) -> None:
        """Start an update without gradients."""

    def before_lane(self, rows: Rows, *, last: bool) -> None:
        """Prepare for the backward of a lane. That of the last lane may send gradients, and the rows."""

    def after_lane(self) -> None:
        """Take the gradients of a lane that is not this rank's last, or end an extra lane."""

    def finish(self) -> Tensor:
        """Take the gradients of the last lane; return the sum of the rows over all ranks."""

    def drop_missing(self, ranks: float) -> None:
        """Drop the gradients that no lane has given, if this many ranks miss one. Every rank must call this."""

    def close(self) -> None:
        """Remove the hooks from the parameters: another sum takes its place."""


def divide(gradients: list[Tensor], count: Tensor) -> None:
    """Divide gradients by a number. As a tensor on their device: CUDA multiplies by the reciprocal of another one."""
    for value in gradients:
        divisor = count.to(value.device)
        if value.dtype in {torch.float16, torch.bfloat16}:
            value.copy_(value.float() / divisor.float())
        else:
            value.div_(divisor.to(value.dtype))


class OptimizerUpdates:
    """The updates of one optimizer: its parameters, their gradient sum, its fp16 scale."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Sequence[nn.Module],
        config: RunConfig,
        world: World,
        strategy: Strategy,
        make_sum: Callable[[list[nn.Parameter]], GradientSum],
    ) -> None:
        self._optimizer, self._make_sum = optimizer, make_sum
        self._may_change = not strategy.replicas
        own = {value for group in optimizer.param_groups for value in group["params"]}
        self._size = _count_parameters(optimizer)
        self._names = {value: name for model in models for name, value in model.named_parameters()}
        self._every = list(self._names)
        self._is_own = [value in own for value in self._every]
        self.precision = Precision(config, world.device, gathers_bf16=strategy.gathers_bf16)
        self.update = make_update(
            optimizer, world.device, compiles=config.compile and not strategy.replicas
        )
        self._gradients: dict[tuple[float, torch.dtype, torch.Size], Tensor] = {}
        self._without_gradient: list[nn.Parameter] | None = None
        self.checks = LossChecks()
        self._rows: dict[tuple[Layout, int], Rows] = {}
        self._device = torch.device(world.device)
        self.selections = 0
        """How often the parameters to train were chosen."""
        self._select([value.requires_grad for value in self._every])

    def _select(self, trainable: list[bool]) -> None:
        """Train the parameters of the optimizer that require a gradient."""
        self._trainable = trainable
        self.selections += 1
        self.parameters = []
        for value, trains, is_own in zip(self._every, trainable, self._is_own, strict=True):
            if trains and is_own:
                self.parameters.append(value)
            elif is_own:
                value.grad = None  # of an earlier step: the optimizer would use it
        self.sum = self._make_sum(self.parameters)
        self._inputs = None if sum(trainable) == len(self.parameters) else tuple(self.parameters)

    def follow_freezing(self) -> None:
        """Train what requires a gradient now: user code may have frozen layers, or thawed them."""
        trainable = [value.requires_grad for value in self._every]
        size = _count_parameters(self._optimizer)
        if size != self._size:
            raise ConfigError(
                f"{type(self._optimizer).__name__} has {size} parameters; it had {self._size} when the loop began",
                fix="give it all parameters before run.steps(...), and set requires_grad=False on those that shall wait",
            )
        if trainable == self._trainable:
            return
        if not self._may_change:
            pairs = zip(self._every, trainable, self._trainable, strict=True)
            names = [self._names[value] for value, now, before in pairs if now != before]
            raise ConfigError(
                f"requires_grad of {names[0]} was changed in the loop, which local SGD does not support",
                fix="set it before run.steps(...), or set local_sgd.steps=0",
            )
        self.sum.close()
        self._select(trainable)

    @property
    def least_rate(self) -> float:
        """The smallest learning rate that the optimizer accepts."""
        return self.update.least_rate

    @property
    def without_gradient(self) -> list[str]:
        """The names of the parameters that no update has given a gradient."""
        return [self._names[value] for value in self._without_gradient or ()]

    def rows_of(self, layout: Layout, lanes: int) -> Rows:
        """Return the memory for rows of this layout, for this many lanes."""
        found = self._rows.get((layout, lanes))
        if found is None:
            found = self._rows[layout, lanes] = Rows(layout, lanes, self._device)
        found.clear()
        return found

    def gradient_of(self, output: Tensor, weight: float) -> Tensor:
        """Return the gradient with which the backward of a lane of this weight starts."""
        scaled = weight * self.precision.scale
        key = scaled, output.dtype, output.shape
        found = self._gradients.get(key)
        if found is None:
            found = self._gradients[key] = torch.full_like(output, scaled, requires_grad=False)
        return found

    def run_backward(self, output: Tensor, gradient: Tensor) -> None:
        """Compute the gradients of this optimizer's parameters; those of others stay as they are."""
        if type(output) is not Tensor or self._inputs == ():
            torch.autograd.backward(output, gradient, inputs=self._inputs)
            return
        # The same without the checks of a gradient that was made to fit: 115 instead of 150 microseconds for a linear layer.
        _run_backward(
            (output,),
            grad_tensors=(gradient,),
            keep_graph=False,
            create_graph=False,
            inputs=self._inputs or (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    def apply(self, clip_norm: float) -> None:
        """Clip the gradients and change the weights; fp16 gradients that overflowed change nothing."""
        reached = [value for value in self.parameters if value.grad is not None]
        if self.precision.unscale([value.grad for value in reached if value.grad is not None]):
            if clip_norm and reached:
                clip(reached, clip_norm)
            self.update.change()
        if self._without_gradient is None or self._without_gradient:
            self._note_missing()

    def _note_missing(self) -> None:
        candidates = self._without_gradient
        if candidates is None:
            candidates = self.parameters
        self._without_gradient = [value for value in candidates if value.grad is None]


def _count_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


# Torch's capturable Adam divides by the learning rate, which gives nan for 0 in a compiled kernel. This is too small to change a weight.
_LEAST_RATE = 1e-30
_ALIGNMENT_BYTES = 512  # of CUDA's allocator
_COMPILED = (torch.optim.Adam, torch.optim.AdamW)


class Update(NamedTuple):
    """A function that changes the weights."""

    change: Callable[[], object]
    least_rate: float = 0.0
    """The smallest learning rate that it accepts."""


def make_update(optimizer: torch.optim.Optimizer, device: str, *, compiles: bool) -> Update:
    """Return the optimizer's step; compiled on a GPU, Adam and AdamW become few kernels unless they are fused.

    For few weights that is several times as fast as the fused kernel, which uses one thread block per 65,536 numbers.
    """
    if device == "cpu":
        return Update(optimizer.step)
    make_capturable(optimizer, device)  # also without capture, so that the bits are the same
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_supported = type(optimizer) in _COMPILED and not is_fused
    if not compiles or not is_supported:
        return Update(optimizer.step)
    step = optimizer.step
    return Update(torch.compile(lambda: step(), dynamic=False), _LEAST_RATE)  # noqa: PLW0108 - compile needs a plain function


def make_capturable(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Keep step count and learning rate on the device, so that a CUDA graph can read them."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if "capturable" in group or group.get("fused"):
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)
            for parameter in group["params"]:
                _move_step_count(optimizer.state.get(parameter, {}), device)


def _move_step_count(state: dict[str, Any], device: str) -> None:
    """Move the step count of an optimizer that has stepped on the host."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(device, torch.float32)


def clip(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale the whole gradient down to a norm; the same bits for any memory layout of the gradients."""
    # On a GPU the order of a sum depends on the alignment of its input, and gradients in buckets are not aligned.
    gradients = [value.grad for value in parameters if value.grad is not None]
    if any(is_sharded(value) for value in gradients):
        clip_sharded(parameters, largest)
        return
    aligned = []
    for value in gradients:
        is_unaligned = value.is_cuda and value.data_ptr() % _ALIGNMENT_BYTES
        aligned.append(value.clone() if is_unaligned else value)
    nn.utils.clip_grads_with_norm_(parameters, largest, nn.utils.get_total_norm(aligned))
