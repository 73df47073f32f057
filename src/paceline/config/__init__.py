"""Settings of a run, and how dataclasses become command lines."""

from paceline.config.instrumentation import RecordConfig
from paceline.config.parse import config_from_argv, config_from_words
from paceline.config.schema import (
    BatchConfig,
    CheckpointConfig,
    LogConfig,
    LrConfig,
    ReadConfig,
    RunConfig,
    TimeoutConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "LogConfig",
    "LrConfig",
    "ReadConfig",
    "RecordConfig",
    "RunConfig",
    "TimeoutConfig",
    "config_from_argv",
    "config_from_words",
]
