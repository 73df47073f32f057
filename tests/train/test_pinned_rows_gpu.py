"""On a GPU: numbers of replayed steps arrive in the order of their steps, and a failed step is found when it is read."""

from __future__ import annotations

import pytest
import torch

from paceline.exact.row import MAX_PENDING_STEPS, Later, PinnedRows

pytestmark = pytest.mark.gpu


def test_numbers_stay_those_of_their_step() -> None:
    rows = PinnedRows(rows=1, columns=2)
    row = torch.zeros(1, 2, dtype=torch.float64, device="cuda")
    sums = []
    for number in range(3 * MAX_PENDING_STEPS):
        row.fill_(number)
        sums.append(Later(rows.copy(row, lambda _: None), 0))
    assert [float(value) for value in sums] == list(range(3 * MAX_PENDING_STEPS))


def test_a_failed_step_is_found_when_its_memory_is_needed_again() -> None:
    def fail(numbers: list[list[float]]) -> None:
        raise ValueError(numbers)

    rows = PinnedRows(rows=1, columns=1)
    row = torch.full((1, 1), 7.0, dtype=torch.float64, device="cuda")
    rows.copy(row, fail)
    for _ in range(MAX_PENDING_STEPS - 1):
        rows.copy(row, lambda _: None)
    with pytest.raises(ValueError, match="7.0"):
        rows.copy(row, lambda _: None)
