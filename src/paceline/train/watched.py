"""How long each act of a training may take, and who looks that it does not take longer."""

from __future__ import annotations

import contextlib

from paceline.config import RunConfig
from paceline.errors import Stopped
from paceline.hang.rank_report import RankException
from paceline.hang.watchdog import Watchdog
from paceline.launch.rank_local import format_error, lost_peer
from paceline.rundir import RunDir
from paceline.telemetry.pulse import REST_S, Pulse
from paceline.train.console import say
from paceline.world.world import World

_COMPILES_S = 120.0  # a step of another shape is compiled when it comes
_CAPTURES_S = 20.0
_SLOW_DISK_BYTES_PER_S = 50e6


def pulse_of(config: RunConfig) -> Pulse:
    """Return what a training shows its signs of life by."""
    rest_s = _COMPILES_S if config.compile else _CAPTURES_S if config.capture != "false" else REST_S
    return Pulse(config.timeout.hang_steps, rest_s)


def disk_s(size_bytes: float) -> float:
    """Return how long a slow disk may take for the state of a run.

    >>> disk_s(100e6)
    2.0
    """
    return size_bytes / _SLOW_DISK_BYTES_PER_S


def watchdog_of(
    directory: RunDir, world: World, config: RunConfig, pulse: Pulse
) -> contextlib.AbstractContextManager[object]:
    """Return who watches this rank; nobody, if that is not wanted."""
    if not config.timeout.hang_steps:
        return contextlib.nullcontext()
    return Watchdog(directory, world, pulse, say, explain)


def explain(error: BaseException) -> RankException | None:
    """Return what went wrong; nothing for a run that was told to stop."""
    if isinstance(error, Stopped) or not isinstance(error, Exception):
        return None
    return RankException(type(error).__name__, format_error(error), lost_peer(error))
