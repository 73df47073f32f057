"""The learning rate as a function of samples, not steps: the same at every world size."""

from __future__ import annotations

import math

from paceline.config import LrConfig, RunConfig

_ONE_CYCLE_START = 1 / 25
_ONE_CYCLE_RISE = 0.3


def scaled_lr(config: RunConfig) -> float:
    """Return the peak learning rate: `lr.base`, scaled by `lr.rule` from `lr.reference_batch` to this batch.

    - `config`: the settings of the run.

    >>> from paceline.config import BatchConfig
    >>> scaled_lr(RunConfig(batch=BatchConfig(global_size=1024), lr=LrConfig(base=0.001, rule="linear")))
    0.004
    """
    return config.lr.base * lr_factor(config)


def lr_factor(config: RunConfig) -> float:
    """Return the factor that the rule applies to the base rate."""
    ratio = config.batch.global_size / config.lr.reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr.rule]


def describe_lr(config: RunConfig) -> str:
    """Return the peak rate and how it was derived, for people.

    >>> from paceline.config import BatchConfig
    >>> describe_lr(RunConfig(batch=BatchConfig(global_size=1024), lr=LrConfig(rule="linear", warmup_samples=2000)))
    'lr 0.0040 = 0.0010 x 4 (linear), warm-up 2,000 samples'
    """
    text = f"lr {human_rate(scaled_lr(config))}"
    if config.lr.rule != "none":
        text += f" = {human_rate(config.lr.base)} x {lr_factor(config):g} ({config.lr.rule})"
    return text + describe_schedule(config)


def describe_schedule(config: RunConfig) -> str:
    """Return how the rate changes; empty if it is constant."""
    text = ""
    if config.lr.schedule != "constant":
        text += f", {config.lr.schedule}"
    if config.lr.warmup_samples:
        text += f", warm-up {config.lr.warmup_samples:,} samples"
    return text


def schedule_factor(lr: LrConfig, seen: int, total: int) -> float:
    """Return the fraction of the peak rate for the step that ends after `seen` of `total` samples.

    >>> [round(schedule_factor(LrConfig(schedule="cosine", warmup_samples=100), seen, 1100), 3) for seen in (50, 100, 600, 1100)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if lr.schedule == "one-cycle":
        return _one_cycle(lr, seen, total)
    if seen < lr.warmup_samples:
        return seen / lr.warmup_samples
    if lr.schedule == "constant":
        return 1.0
    return _cosine(lr.final, seen - lr.warmup_samples, total - lr.warmup_samples)


def _one_cycle(lr: LrConfig, seen: int, total: int) -> float:
    rise = lr.warmup_samples or max(1, int(_ONE_CYCLE_RISE * total))
    if seen < rise:
        return _ONE_CYCLE_START + (1 - _ONE_CYCLE_START) * seen / rise
    return _cosine(lr.final, seen - rise, total - rise)


def _cosine(final: float, seen: int, total: int) -> float:
    """Return the value of a half cosine that falls from 1 to `final`."""
    done = min(1.0, seen / total) if total > 0 else 1.0
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def human_rate(value: float) -> str:
    """Return a learning rate for people.

    >>> human_rate(0.001), human_rate(3e-5)
    ('0.0010', '3e-05')
    """
    return f"{value:.4f}" if 0.00095 <= value < 10 else f"{value:g}"
