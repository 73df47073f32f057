"""Numbers of replayed steps arrive in the order of their steps, with one event for some of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.train.step import async_sums
from paceline.train.step.async_sums import MAX_PENDING_STEPS, AsyncRows


class FakeEvent:
    """Counts the events that were recorded."""

    recorded = 0

    def record(self, stream: object) -> None:
        assert stream == "the stream of the copies"
        FakeEvent.recorded += 1

    def synchronize(self) -> None:
        pass


@pytest.fixture
def rows(monkeypatch) -> AsyncRows:
    cuda = SimpleNamespace(Event=FakeEvent, current_stream=lambda: "the stream of the copies")

    def zeros(*sizes: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.zeros(*sizes, dtype=dtype)

    monkeypatch.setattr(
        async_sums, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, float64=torch.float64)
    )
    monkeypatch.setattr(FakeEvent, "recorded", 0)
    return AsyncRows(lanes=1, columns=2)


def step(rows: AsyncRows, number: int):
    return rows.copy(torch.tensor([[float(number), 1.0]], dtype=torch.float64), lambda _: None)


def test_sixteen_steps_share_an_event(rows) -> None:
    sums = [step(rows, number).column(0) for number in range(200)]
    assert FakeEvent.recorded == 200 // 16
    assert [float(value) for value in sums[-MAX_PENDING_STEPS:]] == list(range(136, 200))
    assert FakeEvent.recorded == 200 // 16 + 1


def test_a_step_that_is_read_at_once_has_its_own_event(rows) -> None:
    found = []
    for number in range(3):
        found.append(float(step(rows, number).column(0)))
        assert FakeEvent.recorded == number + 1
    assert found == [0, 1, 2]


def test_a_failed_step_is_found_when_its_memory_is_needed_again(rows) -> None:
    def fail(numbers: list[list[float]]) -> None:
        raise ValueError(numbers)

    rows.copy(torch.tensor([[7.0, 1.0]], dtype=torch.float64), fail)
    for number in range(MAX_PENDING_STEPS - 1):
        step(rows, number)
    with pytest.raises(ValueError, match="7.0"):
        step(rows, 99)
