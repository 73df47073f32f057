"""All settings of a run: what they are, and how they are read and written."""

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
