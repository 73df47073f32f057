"""The updates of one optimizer: which of its parameters train now, the sum of their gradients, the change of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward as _run_backward

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.train.gradients.protocol import GradientSum
from paceline.train.model.precision import Precision
from paceline.train.step.lane_loss import MeanComparison
from paceline.train.step.weight_update import clip, make_update
from paceline.train.strategy import Strategy
from paceline.world.world import World


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
        self.looks_at_loss = True
        """Whether no loss was looked at yet: one that seems to be a sum over samples is mentioned once."""
        self.means = MeanComparison()
        """Whether the losses of the first updates are means over samples; others are mentioned once."""
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
    def without_gradient(self) -> list[str]:
        """The names of the parameters that no update has given a gradient."""
        return [self._names[value] for value in self._without_gradient or ()]

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
