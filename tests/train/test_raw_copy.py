"""Copies by the driver end where torch's would: the same memory, with torch's copy for everything that is not plain."""

from __future__ import annotations

import ctypes

import pytest
import torch

from paceline.train.step import raw_copy
from paceline.train.step.raw_copy import Destination

_HOST = -1  # what `get_device` gives for memory of the host


class Driver:
    """cuMemcpyAsync for memory of the host; counts the bytes."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.copied = status, 0

    def __call__(self, to: int, given: int, size: int, stream: int) -> int:
        assert stream == 7
        if self.status == 0:
            ctypes.memmove(to, given, size)
            self.copied += size
        return self.status


@pytest.fixture
def driver(monkeypatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(raw_copy, "_driver_copy", lambda: found)
    return found


def filled(given: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
    destination = Destination(torch.zeros(2, 3) if to is None else to, _HOST)
    destination.fill(given, 7)
    return destination.tensor


def test_a_plain_tensor_is_copied_by_the_driver(driver: Driver) -> None:
    rows = torch.arange(12.0).view(4, 3)
    assert torch.equal(filled(rows[1:3]), rows[1:3])
    assert driver.copied == 24


@pytest.mark.parametrize(
    "given",
    [torch.arange(6).view(2, 3), torch.arange(6.0).view(3, 2).t(), torch.arange(3.0)],
    ids=["another dtype", "another order", "another shape"],
)
def test_others_are_copied_by_torch(driver: Driver, given: torch.Tensor) -> None:
    assert torch.equal(filled(given), given.float().expand(2, 3))
    assert driver.copied == 0


@pytest.mark.parametrize(
    "given",
    [torch.ones(2, 3, dtype=torch.complex64).mul(1j).conj(), torch._neg_view(torch.ones(2, 3))],
    ids=["conjugate", "negative"],
)
def test_numbers_that_differ_from_their_memory_are_copied_by_torch(
    driver: Driver, given: torch.Tensor
) -> None:
    assert torch.equal(filled(given, torch.zeros(2, 3, dtype=given.dtype)), given)
    assert driver.copied == 0


def test_a_destination_in_another_order_is_filled_by_torch(driver: Driver) -> None:
    given = torch.arange(6.0).view(2, 3)
    assert torch.equal(filled(given, torch.zeros(3, 2).t()), given)
    assert driver.copied == 0


def test_torch_copies_what_the_driver_refuses(driver: Driver) -> None:
    driver.status = 201  # the thread has no context
    given = torch.arange(6.0).view(2, 3)
    assert torch.equal(filled(given), given)


def test_without_a_driver_torch_copies(monkeypatch) -> None:
    monkeypatch.setattr(raw_copy, "_driver_copy", lambda: None)
    assert filled(torch.ones(2, 3)).sum() == 6
