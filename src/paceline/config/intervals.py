"""How often, and how long: texts such as 500steps, 2epochs, 30s and 10m become numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_EXAMPLES = "500steps, 30s, 10m, 2h, 1epoch, auto or end"

Unit = Literal["steps", "epochs", "seconds", "auto", "end"]


@dataclass(frozen=True)
class Every:
    """The interval between two saves."""

    unit: Unit
    amount: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Every:
        """Return an interval; a bare number counts epochs, and 0 means only at the end.

        >>> Every.parse("500steps"), Every.parse("1 epoch")
        (Every(unit='steps', amount=500), Every(unit='epochs', amount=1))
        >>> Every.parse("10m"), Every.parse("auto")
        (Every(unit='seconds', amount=600.0), Every(unit='auto', amount=0.0))
        """
        normal = text.strip().lower()
        if normal in {"auto", "end"}:
            return cls(normal)  # type: ignore[arg-type]
        counted = re.fullmatch(r"(\d+) ?(steps?|epochs?)?", normal)
        if counted:
            return cls._counted(int(counted[1]), counted[2] or "epochs")
        try:
            return cls("seconds", seconds_from(normal))
        except ConfigError:
            raise ConfigError(
                f"checkpoint.every={text!r} is not an interval", fix=f"give it as {_EXAMPLES}"
            ) from None

    @classmethod
    def _counted(cls, amount: int, unit: str) -> Every:
        if not amount:
            return cls("end")
        return cls("steps" if unit.startswith("step") else "epochs", amount)


def seconds_from(text: str) -> float:
    """Return the seconds of a duration.

    >>> seconds_from("30s"), seconds_from("1.5h"), seconds_from("02:00:00"), seconds_from("90")
    (30.0, 5400.0, 7200.0, 90.0)
    """
    normal = text.strip().lower()
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d)", normal)
    if clock:
        return int(clock[1] or 0) * 3600.0 + int(clock[2]) * 60.0 + int(clock[3])
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)?", normal)
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is not a duration", fix="give it as 30s, 10m, 2h or HH:MM:SS")
    return float(match[1]) * _SECONDS[match[2] or "s"]
