"""The rate depends on samples seen, never on steps or ranks."""

import pytest

from paceline.config import BatchConfig, LrConfig, RunConfig
from paceline.scale.lr import describe_lr, scaled_lr, schedule_factor


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_rule_scales_from_the_reference_batch(rule, factor):
    lr = LrConfig(base=0.5, rule=rule, reference_batch=256)
    config = RunConfig(batch=BatchConfig(global_size=1024), lr=lr)
    assert scaled_lr(config) == 0.5 * factor
    assert (f"0.5000 x {factor} ({rule})" in describe_lr(config)) == (factor > 1)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle"])
def test_a_schedule_rises_to_its_peak_and_never_above(schedule):
    lr = LrConfig(schedule=schedule, warmup_samples=100, final=0.1)
    factors = [schedule_factor(lr, seen, 1000) for seen in range(1, 1001)]
    assert max(factors) == 1.0
    assert factors[:100] == sorted(factors[:100])
    assert factors[-1] == (1.0 if schedule == "constant" else pytest.approx(0.1))
