"""What a loss function may return for a lane, as sums that can be added over lanes and ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from paceline.errors import ConfigError, TrainingError
from paceline.train.step.async_sums import AsyncSum

LossFunction = Callable[[Any], Any]
"""loss(batch) -> the mean over the lane's samples, (sum, count), or a dict with the key "loss" and other values."""

_LOSS = "loss"
_NAMES = (_LOSS,)


class LaneLoss(NamedTuple):
    """The loss of one lane."""

    output: Tensor
    """The tensor from which backward starts."""
    value: float
    """The loss as the function returned it."""
    by_count: bool
    """Whether the loss gave (sum, count): then gradients are divided by the count of all lanes at the end."""
    names: tuple[str, ...]
    sums: tuple[float, ...]
    """The sum of each named value over the lane."""
    counts: tuple[float, ...]


def lane_loss(result: Any, samples: int) -> LaneLoss:
    """Return the loss of a lane with this many samples.

    >>> import torch
    >>> lane_loss({"loss": torch.tensor(0.5, requires_grad=True), "kl": 2.0}, 4).sums
    (2.0, 8.0)
    >>> lane_loss((torch.tensor(6.0, requires_grad=True), 3), 4)[1:]
    (6.0, True, ('loss',), (6.0,), (3.0,))
    """
    if isinstance(result, Tensor):  # most losses: no dict is made
        _check_output(result)
        value = result.item()
        sums, counts = (value * samples,), (float(samples),)
        return LaneLoss(result, value, False, _NAMES, sums, counts)  # noqa: FBT003 - not by count
    output, ordered = named_values(result)
    value = output.item()  # read once: on a GPU the host waits for it
    is_counted = isinstance(ordered[_LOSS], tuple)
    ordered[_LOSS] = (value, ordered[_LOSS][1]) if is_counted else value
    pairs = [_sum_and_count(name, value, samples) for name, value in ordered.items()]
    sums, counts = zip(*pairs, strict=True)
    return LaneLoss(output, value, is_counted, tuple(ordered), sums, counts)


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
    output = first[0] if isinstance(first, tuple) else first
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


def _sum_and_count(name: str, value: Any, samples: int) -> tuple[float, float]:
    """Return (sum, count) of a value; a plain number is a mean over the samples."""
    total, count = value if isinstance(value, tuple) else (None, samples)
    if total is None:
        number = _number(name, value)
        return number * samples, float(samples)
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ConfigError(
            f"the loss returned a tuple whose second element is a tensor of shape {list(count.shape)}, not a count",
            fix="return the loss alone, or (sum, count) with a number of samples or tokens",
        )
    return _number(name, total), _number(name, count)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, int | float):
        return float(value)
    shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ConfigError(
        f"the value {name!r} of the loss is {shape}, not one number",
        fix="return its mean over the samples, or (sum, count)",
    )


class Losses(Mapping[str, float]):
    """The means of an update over all samples of the step: `float(losses)` is the loss, `losses["kl"]` another value.

    On a GPU a value may still be computed: then the first reader waits for it.
    """

    def __init__(
        self, sums: Mapping[str, float | AsyncSum], counts: Mapping[str, float | AsyncSum]
    ) -> None:
        self._values, self._counts = sums, counts

    @property
    def _of_loss(self) -> tuple[float | AsyncSum, float | AsyncSum]:
        """Sum and count of the loss, which may still be computed."""
        return self._values[_LOSS], self._counts[_LOSS]

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


def means(names: tuple[str, ...], sums: list[float], counts: list[float]) -> Losses:
    """Return the mean of each value; nan if nothing was counted."""
    return Losses(dict(zip(names, sums, strict=True)), dict(zip(names, counts, strict=True)))


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


_SUM = 2
"""`reduction="sum"` in the nodes of torch's loss functions."""


def is_sum_over_samples(loss: Tensor, samples: int) -> bool:
    """Return whether torch's graph shows that a loss is a sum over its samples, which the run would take for a mean.

    >>> import torch
    >>> rows = torch.ones(4, 3, requires_grad=True)
    >>> is_sum_over_samples(rows.square().sum() + 0.1 * rows.mean(), 4), is_sum_over_samples(rows.sum() / 4, 4)
    (True, False)
    """
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        kind = node.name()
        if kind.startswith(("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze")):
            nodes += [earlier for earlier, _ in node.next_functions]
        elif kind.startswith("Mul"):  # a factor of about 1 / samples makes a mean
            factors = [_saved(node, name) for name in ("_saved_other", "_saved_self")]
            numbers = [
                float(value)  # a tensor, or a float of label_smoothing=
                for value in factors
                if value is not None and not getattr(value, "ndim", 0)
            ]
            if not any(0 < abs(number) * samples <= 1.001 for number in numbers):
                nodes += [earlier for earlier, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return True
        elif kind == "SumBackward0":
            shape: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
            if samples > 1 and len(shape) > 0 and shape[0] == samples:
                return True
    return False


_MEAN = 1
"""`reduction="mean"` in the nodes of torch's loss functions."""
_UPDATES = 4
"""Updates whose losses are examined for means: a GPU's host waits for the count of each."""


class MeanNode(NamedTuple):
    """A mean in the graph of a loss."""

    kind: str
    divisor: float
    """By what it divides: the number of its values, without those that are ignored, or the sum of class weights."""
    factor: float
    """What it is multiplied with in the loss."""


def means_in(loss: Tensor) -> list[MeanNode]:
    """Return the means that torch's graph shows in a loss: of its loss functions, `.mean()`, and a sum divided by a count.

    >>> import torch
    >>> rows = torch.ones(4, 3, requires_grad=True)
    >>> [mean[1:] for mean in means_in(0.5 * rows.mean() + rows.sum() / 6)]
    [(12.0, 0.5), (6.0, 1.0)]
    >>> targets = torch.tensor([0, 1, -100, -100])
    >>> means_in(torch.nn.functional.cross_entropy(rows, targets))
    [MeanNode(kind='NllLossBackward0', divisor=2.0, factor=1.0)]
    """
    found: list[MeanNode] = []
    nodes: list[tuple[Any, float, float]] = [(loss.grad_fn, 1.0, 1.0)]
    while nodes:
        node, divisor, factor = nodes.pop(0)
        if node is None:
            continue
        kind = node.name()
        if kind.startswith("Mul"):
            factor *= _constant_factor(node)
        elif kind.startswith("Div"):
            by = _constant_factor(node)
            divisor, factor = (divisor * by, factor) if by == int(by) else (divisor, factor / by)
        if kind.startswith(("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Mul", "Div")):
            nodes += [(earlier, divisor, factor) for earlier, _ in node.next_functions]
        elif kind == "SumBackward0":
            found.append(MeanNode(kind, divisor, factor))
        elif kind == "MeanBackward0":
            count = node._saved_self_sym_numel  # noqa: SLF001 - torch has no public name
            found.append(MeanNode(kind, divisor * count, factor))
        elif getattr(node, "_saved_reduction", None) == _MEAN:
            weights = _saved(node, "_saved_total_weight")
            count = node._saved_target.numel() if weights is None else float(weights)  # noqa: SLF001
            found.append(MeanNode(kind, divisor * count, factor))
    return found


def _constant_factor(node: Any) -> float:
    """Return the number that a node multiplies with or divides by; 1 if it is no number, or depends on parameters."""
    operands = [_saved(node, name) for name in ("_saved_other", "_saved_self")]
    given = [value for value in operands if value is not None]
    if len(given) != 1 or (isinstance(given[0], Tensor) and given[0].ndim):
        return 1.0
    return float(given[0]) or 1.0


class MeanComparison:
    """Compares by what the means in a loss divide, from lane to lane: each lane counts by its samples.

    A mean over tokens, over the masked values or with class weights divides by another number in every lane.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._last: tuple[int, int] | None = None
        self._first: dict[int, tuple[int, int, int, list[MeanNode]]] = {}

    @property
    def is_over(self) -> bool:
        """Whether no further loss is examined."""
        return self._updates > _UPDATES

    def add(
        self, loss: Tensor, lane: int, samples: int, update: tuple[int, int], lanes: int
    ) -> str:
        """Examine the loss of a lane in an update (step, number), on a rank with this many; return what differs, or ""."""
        if update != self._last:
            self._last = update
            self._updates += 1
        if self.is_over:
            return ""
        step, number = update
        now = step, lane, samples, means_in(loss)
        first = self._first.get(number)
        if first is None or (first[0] != step and lanes > 1):
            self._first[number] = now
            return ""
        _, other_lane, other_samples, others = first
        if [each.kind for each in now[3]] != [each.kind for each in others]:
            return ""
        for mean, other in zip(now[3], others, strict=True):
            share, other_share = mean.divisor / samples, other.divisor / other_samples
            # A loss that is multiplied by its count, or divided by a constant, is right.
            if not (
                _is_near(mean.divisor, other.divisor)
                or _is_near(share, other_share)
                or _is_near(share / mean.factor, other_share / other.factor)
            ):
                self._updates = _UPDATES + 1
                return (
                    f"by {other.divisor:.6g} in lane {other_lane} ({other_samples} samples) and "
                    f"by {mean.divisor:.6g} in lane {lane} ({samples} samples)"
                )
        return ""


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5)


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved for backward; None if it has no such value, or the value was changed since."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return getattr(node, name)
    return None


_NEAR, _DEEP = 200, 400
"""Nodes of torch's graph that are looked at behind the loss, and behind one factor of a product."""
_NETWORK = ("Addmm", "Mm", "Bmm", "Convolution", "Embedding")


def compares_samples(loss: Tensor, samples: int) -> bool:
    """Return whether torch's graph shows a table of every sample against every other, as contrastive losses make.

    That is a square product of two outputs of networks, with one or more rows for each sample. A layer is none:
    its second factor is a weight.

    >>> import torch
    >>> rows = torch.nn.Embedding(9, 3)(torch.arange(8))
    >>> compares_samples((rows @ rows.T).mean(), 8), compares_samples((rows @ torch.ones(3, 8)).mean(), 8)
    (True, False)
    """
    if samples < 2:
        return False
    for node in _nodes_behind(loss.grad_fn, _NEAR):
        if not node.name().startswith("MmBackward"):  # attention within a sample is a Bmm
            continue
        rows: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())[-2:-1]
        columns: tuple[int, ...] = getattr(node, "_saved_mat2_sym_sizes", ())[-1:]
        factors = [earlier for earlier, _ in node.next_functions]
        if not rows or rows != columns or rows[0] % samples or len(factors) != 2:
            continue
        if all(
            any(each.name().startswith(_NETWORK) for each in _nodes_behind(factor, _DEEP))
            for factor in factors
        ):
            return True
    return False


def _nodes_behind(first: Any, most: int) -> list[Any]:
    """Return the nearest nodes of torch's graph, from the result towards the weights."""
    found = [] if first is None else [first]
    seen = set(found)
    for node in found:
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in seen and len(found) < most:
                seen.add(earlier)
                found.append(earlier)
    return found
