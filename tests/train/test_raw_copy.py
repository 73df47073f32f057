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


CASES = {
    "another dtype": (torch.arange(6).view(2, 3), torch.zeros(2, 3)),
    "another order": (torch.arange(6.0).view(3, 2).t(), torch.zeros(2, 3)),
    "another shape": (torch.arange(3.0), torch.zeros(2, 3)),
    "conjugate": (
        torch.ones(2, 3, dtype=torch.complex64).mul(1j).conj(),
        torch.zeros(2, 3, dtype=torch.complex64),
    ),
    "negative": (torch._neg_view(torch.ones(2, 3)), torch.zeros(2, 3)),
    "destination in another order": (torch.arange(6.0).view(2, 3), torch.zeros(3, 2).t()),
}


@pytest.mark.parametrize(("given", "to"), CASES.values(), ids=CASES)
def test_others_are_copied_by_torch(driver: Driver, given: torch.Tensor, to: torch.Tensor) -> None:
    assert torch.equal(filled(given, to), given.to(to.dtype).expand(2, 3))
    assert driver.copied == 0


@pytest.mark.parametrize("has_driver", [True, False])
def test_torch_copies_what_the_driver_refuses_and_where_there_is_none(
    driver: Driver, has_driver: bool, monkeypatch
) -> None:
    driver.status = 201  # the thread has no context
    if not has_driver:
        monkeypatch.setattr(raw_copy, "_driver_copy", lambda: None)
    given = torch.arange(6.0).view(2, 3)
    assert torch.equal(filled(given), given)
