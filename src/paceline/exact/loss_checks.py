"""Likely mistakes in a loss, found in torch's graph of the first updates: a sum, a mean that is none over samples, contrast.

With one lane the loss of a lane is that of the batch. With several it is not for these losses; each is named once.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

from torch import Tensor

from paceline import terminal
from paceline.data.reading.batches import Lane, RankBatch


class LossChecks:
    """Examines the losses of an optimizer's first updates, and mentions each likely mistake once."""

    def __init__(self) -> None:
        self._is_first = True
        self._means = MeanComparison()

    @property
    def is_due(self) -> bool:
        """Whether the losses of the next update are examined."""
        return self._is_first or not self._means.is_over

    def examine(
        self, output: Tensor, lane: Lane, step: RankBatch, number: int, *, by_count: bool
    ) -> None:
        """Examine the loss of a lane in the update of this number in its step. Only the main rank calls this."""
        plan, samples = step.plan, lane.samples
        if self._is_first:
            self._is_first = False
            if samples and (lanes := round(plan.samples / samples)) > 1:
                _mention_likely_mistakes(output, samples, plan.samples, lanes, by_count=by_count)
        if self._means.is_over or by_count or samples in {0, plan.samples}:
            return
        update = plan.index, number
        if how := self._means.add(output, lane.number, samples, update, len(step.lanes)):
            terminal.error(
                f"warning: the loss is a mean that divides {how}, and each lane counts by its samples: this is not the mean "
                "over all tokens or weights of the step\n"
                "  fix: return (loss * count, count), where count is what the mean divides by, such as "
                "(labels != -100).sum()"
            )


def _mention_likely_mistakes(
    output: Tensor, samples: int, samples_of_step: int, lanes: int, *, by_count: bool
) -> None:
    """Say that a loss of a lane is not what the loss of the batch would be; with one lane they are the same."""
    if compares_samples(output, samples):
        terminal.error(
            f"warning: the loss seems to compare the samples of a batch with each other, and is computed per lane: each sample is "
            f"compared with those of its lane of {samples}, not with the {samples_of_step} of the batch\n"
            "  fix: return the rows from the function and pass the loss as run.update(optimizer, rows, step, over_batch=loss), "
            "or set batch.lanes=1 to train on one rank"
        )
    if not by_count and is_sum_over_samples(output, samples):
        terminal.error(
            f'warning: the loss seems to be a sum over samples (reduction="sum"), and a tensor is taken for the mean of its lane: '
            f"with {lanes} lanes the gradient is 1/{lanes} of that of the sum over the batch\n"
            "  fix: return (loss, samples) for the mean over samples, or multiply the loss by config.batch.lanes for the sum"
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
