"""A metric for classifiers."""

from __future__ import annotations

from torch import Tensor


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return for each sample whether the largest output is at the target class: 1 or 0.

    - `outputs`: one row of scores per sample.
    - `target`: the number of the right class of each sample.

    >>> paceline.accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return (outputs.argmax(dim=-1) == target).float()
