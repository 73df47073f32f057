"""Which settings exclude each other: every check that reads more than one group of settings."""

from __future__ import annotations

from typing import Protocol

from paceline.config.diloco import LocalSgdConfig
from paceline.config.lanes import AutoLanes
from paceline.errors import ConfigError


class _Batch(Protocol):
    @property
    def lanes(self) -> int: ...


class _Settings(Protocol):
    """The settings of a run that are read here; importing RunConfig would be a circle."""

    @property
    def parallel(self) -> str: ...
    @property
    def shard_over(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def capture(self) -> str: ...
    @property
    def compression(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def batch(self) -> _Batch: ...
    @property
    def local_sgd(self) -> LocalSgdConfig: ...


def check_combinations(config: _Settings) -> None:
    """Raise ConfigError for settings that cannot be used together."""
    if config.parallel == "fsdp":
        _check_fsdp(config)
    elif config.shard_over:
        raise ConfigError(
            f"shard_over={config.shard_over} needs parallel=fsdp, got parallel={config.parallel}",
            fix="add parallel=fsdp, or set shard_over=0",
        )
    if config.local_sgd.steps:
        _check_local_sgd(config)
    elif config.compression != "none":
        _check_gradient_compression(config)


def _check_fsdp(config: _Settings) -> None:
    if config.shard_over == 1:
        raise ConfigError(
            "shard_over=1 leaves the whole model on every rank",
            fix="set parallel=ddp, or shard_over=0",
        )
    if config.capture == "true":
        raise ConfigError(
            "parallel=fsdp does not support CUDA graph capture (capture=true)",
            fix="set capture=false, or parallel=ddp",
        )
    if config.precision == "fp16":
        raise ConfigError(
            "parallel=fsdp does not support precision=fp16: it has no gradient scaler",
            fix="set precision=bf16, or parallel=ddp",
        )
    if config.compression != "none":
        raise ConfigError(
            f"compression={config.compression} works only with parallel=ddp",
            fix="set compression=none, or parallel=ddp",
        )


def _check_local_sgd(config: _Settings) -> None:
    lanes, replicas = config.batch.lanes, config.local_sgd.replicas
    if lanes % replicas and not isinstance(lanes, AutoLanes):
        raise ConfigError(
            f"batch.lanes={lanes} is not a multiple of local_sgd.replicas={replicas}",
            fix=f"set local_sgd.replicas to one of {_divisors(lanes)}, "
            f"or batch.lanes to a multiple of {replicas}",
        )
    if config.parallel == "fsdp":
        raise ConfigError(
            "local SGD keeps whole replicas, so it does not support parallel=fsdp",
            fix="set parallel=ddp, or local_sgd.steps=0",
        )
    if config.capture == "true":
        raise ConfigError(
            "local SGD does not support CUDA graph capture (capture=true)",
            fix="set capture=false, or local_sgd.steps=0",
        )
    if config.compression == "powersgd":
        raise ConfigError(
            "compression=powersgd compresses gradients, and local SGD sends weight differences",
            fix="set compression=bf16 or compression=none",
        )
    if config.precision not in {"fp32", "tf32", "bf16"}:
        raise ConfigError(
            f"local SGD supports precision fp32, tf32 and bf16, got {config.precision}",
            fix="set precision=bf16, or local_sgd.steps=0",
        )


def _check_gradient_compression(config: _Settings) -> None:
    if config.exact:
        raise ConfigError(
            f"compression={config.compression} rounds gradients, so exact=true cannot hold",
            fix="add exact=false, or set compression=none",
        )
    if config.capture != "false":
        raise ConfigError(
            f"compression={config.compression} does not support CUDA graph capture "
            f"(capture={config.capture})",
            fix="set capture=false or compression=none",
        )


def _divisors(number: int) -> str:
    """Return the divisors of a number.

    >>> _divisors(6)
    '1, 2, 3, 6'
    """
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
