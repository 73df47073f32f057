"""Sums of lanes by the definition of the tree, without any of the code under test."""

from __future__ import annotations

import torch

from paceline.scale.batch import share
from paceline.scale.tree import children, whole_subtrees


def tree_sum(values: list[torch.Tensor], node: range) -> torch.Tensor:
    """Return the sum of the lanes of a node: halves first."""
    if len(node) == 1:
        return values[node.start]
    left, right = children(node)
    return tree_sum(values, left) + tree_sum(values, right)


def lane_values(lanes: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, generator=generator) * 10.0**lane).to(dtype) for lane in range(lanes)
    ]


def sums_of_rank(values: list[torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """Return the sums that a rank sends: of the whole subtrees of its lanes."""
    lanes = len(values)
    return [
        tree_sum(values, node).clone() for node in whole_subtrees(share(lanes, rank, ranks), lanes)
    ]
