"""Numbers of replayed steps arrive in the order of their steps, each with an event of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.train.step import async_sums
from paceline.train.step.async_sums import MAX_PENDING_STEPS, AsyncRows


class FakeEvent:
    """Remembers on which streams it was recorded, and whether somebody waited for it."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.waits = 0

    def record(self, stream: SimpleNamespace) -> None:
        self.streams.append(stream.cuda_stream)

    def synchronize(self) -> None:
        self.waits += 1


class FakeCuda(SimpleNamespace):
    """What `torch.cuda` offers, on a machine without a GPU."""

    def __init__(self) -> None:
        super().__init__(made=[], stream=7, current_device=lambda: 0)

    def Event(self) -> FakeEvent:  # noqa: N802 - as torch names it
        self.made.append(FakeEvent())
        return self.made[-1]

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=self.stream)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    found = FakeCuda()

    def zeros(*sizes: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.zeros(*sizes, dtype=dtype)

    native = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: found.stream)
    names = {"cuda": found, "zeros": zeros, "float64": torch.float64, "_C": native}
    monkeypatch.setattr(async_sums, "torch", SimpleNamespace(**names))
    return found


def step(rows: AsyncRows, number: int):
    return rows.copy(torch.tensor([[float(number), 1.0]], dtype=torch.float64), lambda _: None)


def test_numbers_stay_those_of_their_step_and_no_step_waits_for_the_next(cuda) -> None:
    rows = AsyncRows(lanes=1, columns=2)
    sums = [step(rows, number).column(0) for number in range(200)]
    assert [float(value) for value in sums] == list(range(200))
    assert len(cuda.made) == MAX_PENDING_STEPS
    rows = AsyncRows(lanes=1, columns=2)
    first = step(rows, 0)
    step(rows, 1)
    assert float(first.column(0)) == 0
    assert [event.waits for event in cuda.made[MAX_PENDING_STEPS:][:2]] == [1, 0]


def test_an_event_follows_a_change_of_the_stream(cuda) -> None:
    rows = AsyncRows(lanes=1, columns=2)
    for cuda.stream in (7, 9, 9, 7):
        step(rows, 0)
    assert [event.streams for event in cuda.made[:4]] == [[7], [9], [9], [7]]


def test_a_failed_step_is_found_when_its_memory_is_needed_again(cuda) -> None:
    def fail(numbers: list[list[float]]) -> None:
        raise ValueError(numbers)

    rows = AsyncRows(lanes=1, columns=2)
    rows.copy(torch.tensor([[7.0, 1.0]], dtype=torch.float64), fail)
    for number in range(MAX_PENDING_STEPS - 1):
        step(rows, number)
    with pytest.raises(ValueError, match="7.0"):
        step(rows, 99)
