"""Speeds leave out evaluations, and steps that compile or capture; losses leave out nothing."""

from __future__ import annotations

import time

import pytest

from paceline.config import RunConfig
from paceline.exact.row import StepSums
from paceline.train.observers.meter import Meter, WarmUp


class OneRank:
    """An engine whose sums are those of this rank."""

    def total(self, sums: StepSums) -> StepSums:
        """Return the sums of the only rank."""
        return sums


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that `time.perf_counter` shows; tests set them."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def speed_of(config: RunConfig, clock: list[float], seconds: list[float]) -> tuple[float, float]:
    """Return mean loss and speed after steps of 8 samples that took these seconds."""
    meter, warm_up = Meter(), WarmUp(config)
    for spent in seconds:
        warm_up.begin()
        clock[0] += spent
        meter.add(StepSums(8.0, 8.0), 8)
        if warm_up.counts(8):
            meter.leave_out(warm_up.seconds, 8)
    return meter.close(OneRank())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "seconds", "speed"),
    [
        (RunConfig(compile=True), [30.0, 1.0, 2.0, 0.5, 0.5], 16.0),
        (RunConfig(capture="auto"), [30.0, 1.0, 2.0, 0.5, 0.5], 16.0),
        (RunConfig(), [30.0, 1.0, 2.0, 0.5, 0.5], 40 / 34),
        (RunConfig(compile=True), [3.0, 1.0], 4.0),  # nothing but warm-up
    ],
)
def test_a_compiled_run_is_as_fast_as_its_later_steps(config, seconds, speed, clock) -> None:
    assert speed_of(config, clock, seconds) == (1.0, speed)


def test_an_evaluation_within_a_first_step_is_left_out_once(clock: list[float]) -> None:
    meter, warm_up = Meter(), WarmUp(RunConfig(compile=True))
    warm_up.begin()
    clock[0] += 5.0  # an evaluation of 4 s in a step of 1 s
    meter.leave_out(4.0)
    warm_up.leave_out(4.0)
    meter.add(StepSums(0.0, 1.0), 1)
    meter.leave_out(warm_up.seconds, 1)
    clock[0] += 2.0
    meter.add(StepSums(0.0, 1.0), 1)
    assert meter.close(OneRank())[1] == 0.5  # type: ignore[arg-type]
