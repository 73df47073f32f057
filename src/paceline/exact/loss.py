"""What a loss function may return for a lane, and the means that an update returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsFloat

from torch import Tensor

from paceline.errors import ConfigError, TrainingError

LossFunction = Callable[[Any], Any]
"""loss(batch) -> the mean over the lane's samples, (sum, count), or a dict with the key "loss" and other values."""

_LOSS = "loss"


def named_values(result: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the tensor from which backward starts, and all values of a loss by name, the loss first."""
    _refuse_model_output(result)
    values = dict(result) if isinstance(result, Mapping) else {_LOSS: result}
    if _LOSS not in values:
        raise ConfigError(
            f'the loss returned a dict without the key "loss": {", ".join(map(str, values))}',
            fix='return {"loss": the mean over the samples, ...}',
        )
    first = values.pop(_LOSS)
    output = first
    if isinstance(first, tuple):
        output, count = first
        if isinstance(count, Tensor) and count.numel() != 1:
            raise ConfigError(
                f"the loss returned a tuple whose second element is a tensor of shape {list(count.shape)}, not a count",
                fix="return the loss alone, or (sum, count) with a number of samples or tokens",
            )
    _check_output(output)
    return output, {_LOSS: first, **values}


def _refuse_model_output(result: Any) -> None:
    """Raise for what a model returns, such as the ModelOutput of transformers: a mapping with attributes, or an object."""
    if type(result) is dict or isinstance(result, tuple | Tensor):
        return
    if isinstance(result, Mapping) and all(map(_is_number, result.values())):
        return  # a dict of its own class that holds losses only
    if not hasattr(result, _LOSS) and not hasattr(result, "logits"):
        return
    name = type(result).__name__
    if isinstance(getattr(result, _LOSS, None), Tensor):
        raise ConfigError(
            f"the loss function returned the output of the model, {name}, not a loss",
            fix="return its loss: model(**batch).loss",
        )
    raise ConfigError(
        f"the loss function returned the output of the model, {name}, which has no loss",
        fix="pass labels=... to the model and return its .loss, or compute a loss from its .logits",
    )


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


_INSTEAD = {
    type(None): "add a return to the loss function",
    float: "return the tensor itself, without .item() or float()",
}


def _check_output(output: Any) -> None:
    if not isinstance(output, Tensor):
        usual = "return the mean over the samples as a tensor of shape [], or (sum, count)"
        raise ConfigError(
            f"the loss returned {type(output).__name__}, not a tensor",
            fix=_INSTEAD.get(type(output), usual),
        )
    if output.numel() != 1:
        raise ConfigError(
            f"the loss returned a tensor of shape {list(output.shape)}, not one number",
            fix="return its mean over the samples: .mean(), or (sum, count)",
        )
    if not output.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that requires a gradient",
            fix="compute it from the model's outputs, outside of torch.no_grad() and without .detach()",
        )


def single_number(name: str, value: Any) -> Tensor | float:
    """Return a value of the loss: a tensor with one element, or a Python number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    if isinstance(value, int | float):
        return float(value)
    shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ConfigError(
        f"the value {name!r} of the loss is {shape}, not one number",
        fix="return its mean over the samples, or (sum, count) with a number of samples or tokens",
    )


class Losses(Mapping[str, float]):
    """The means of an update over all samples of the step: `float(losses)` is the loss, `losses["kl"]` another value.

    On a GPU a value may still be computed: then the first reader waits for it.
    """

    def __init__(
        self, sums: Mapping[str, SupportsFloat], counts: Mapping[str, SupportsFloat]
    ) -> None:
        self._values, self._counts = sums, counts

    def __getitem__(self, name: str) -> float:
        count = float(self._counts[name])
        return float(self._values[name]) / count if count else math.nan

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __float__(self) -> float:
        return self[_LOSS]

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return repr(dict(self))


class LossesOfReplicas(Losses):
    """The losses of an update with local SGD, which no rank knows."""

    def __init__(self) -> None:
        super().__init__({_LOSS: 0.0}, {_LOSS: 0.0})

    def __getitem__(self, name: str) -> float:
        raise ConfigError(
            "with local_sgd.steps a rank knows the losses of its own replicas only",
            fix="read the loss in the progress line or in the report, or set local_sgd.steps=0",
        )


def refuse_no_count(count: float, step: int) -> None:
    """Raise if a loss that returns (sum, count) has counted nothing."""
    if not count:
        raise TrainingError(
            f"the loss returned a total count of 0 in step {step + 1}: every token of every lane is masked",
            fix="check the mask of the loss and the samples that it masks",
        )


def not_finite(
    value: float, step: int, where: str, when: str = "before the update"
) -> TrainingError:
    """Return the error for a loss that is inf or nan."""
    return TrainingError(
        f"the loss is {value} at step {step + 1}, {where}; training stopped {when}",
        fix="try lr.base 10 x lower, lr.warmup_samples or clip_norm; check this lane's inputs for inf or nan, "
        "and the loss for log or division of 0",
    )
