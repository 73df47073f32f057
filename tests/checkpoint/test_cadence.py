"""When a checkpoint is due: by steps and epochs, by the clock, or where saving and losing cost the same."""

from __future__ import annotations

import math

import pytest

from paceline.checkpoint.cadence import Cadence, young_daly_s
from paceline.config import CheckpointConfig
from paceline.config.intervals import Every, seconds_from
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("500steps", "steps", 500),
        ("1 step", "steps", 1),
        ("2epochs", "epochs", 2),
        ("3", "epochs", 3),
        ("0", "end", 0),
        ("30s", "seconds", 30),
        ("0.5s", "seconds", 0.5),
        ("10m", "seconds", 600),
        ("2h", "seconds", 7200),
        ("auto", "auto", 0),
        ("end", "end", 0),
    ],
)
def test_an_interval_is_read_as_it_is_written(text: str, unit: str, amount: float) -> None:
    assert Every.parse(text) == Every(unit, amount)


def test_what_is_no_interval_or_no_time_is_refused_with_examples() -> None:
    for text in ("", "often", "5 minutes", "-3steps", "1.5epochs", "0s", "steps", "10x"):
        with pytest.raises(ConfigError, match="500steps, 30s"):
            CheckpointConfig(every=text)
    for text in ("", "soon", "0", "1:2:3:4", "5x"):
        with pytest.raises(ConfigError, match="HH:MM:SS"):
            seconds_from(text)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ({"keep": 0}, "set checkpoint.keep=1 or more"),
        ({"best": "acc"}, "max:acc or min:eval_loss"),
        ({"mtbf_h": 0.0}, "set it to hours: checkpoint.mtbf_h=24"),
        ({"to": "s3://key:secret@bucket/x"}, "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: dict, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**words)
    assert fix in caught.value.fix
    assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")


def cadence(every: str, now_s: float = 0.0) -> Cadence:
    return Cadence(Every.parse(every), mtbf_s=86400.0, steps_per_epoch=10, now_s=now_s)


def test_steps_and_epochs_are_known_to_every_rank_without_a_clock() -> None:
    assert [step for step in range(1, 31) if cadence("7steps").due_after(step)] == [7, 14, 21, 28]
    assert [step for step in range(1, 31) if cadence("2epochs").due_after(step)] == [20]
    assert not any(
        cadence(every).due_after(step) for every in ("end", "auto", "5s") for step in range(1, 31)
    )
    assert not cadence("7steps").due_at(1e9)
    assert not cadence("end").due_at(1e9)


def test_seconds_count_from_the_last_save() -> None:
    clock = cadence("5s", now_s=100.0)
    assert [clock.due_at(100.0 + passed) for passed in (0, 4.9, 5.0)] == [False, False, True]
    clock.begun(105.0)
    assert not clock.due_at(109.0)
    clock.learn(held_s=1.0, total_s=100.0)
    assert clock.due_at(110.0), "a stated interval does not change with what a save costs"


def test_auto_saves_where_the_cost_of_saving_and_of_losing_is_least() -> None:
    clock = cadence("auto")
    assert clock.due_at(30.0)
    assert not clock.due_at(29.0)
    clock.learn(held_s=0.5, total_s=2.0)
    assert clock.interval_s == pytest.approx(math.sqrt(2 * 0.5 * 86400.0))
    clock.learn(held_s=1e-6, total_s=60.0)
    assert clock.interval_s == 120.0, "a slow disk is asked for half of its time at most"


def test_the_interval_is_the_one_that_loses_least() -> None:
    def lost(interval_s: float, cost_s: float = 2.0, mtbf_s: float = 3600.0) -> float:
        return cost_s / interval_s + interval_s / 2 / mtbf_s

    best = young_daly_s(2.0, 3600.0)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
