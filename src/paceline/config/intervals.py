"""How often, and how long: words such as 500steps, 2epochs, 30s, 10m become numbers."""

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
    """How often something is due."""

    unit: Unit
    amount: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Every:
        """Read an interval; a bare number counts epochs, and 0 means at the end only.

        >>> Every.parse("500steps"), Every.parse("1 epoch"), Every.parse("10m"), Every.parse("auto")
        (Every(unit='steps', amount=500), Every(unit='epochs', amount=1), Every(unit='seconds', amount=600.0), Every(unit='auto', amount=0.0))
        """
        words = text.strip().lower()
        if words in {"auto", "end"}:
            return cls(words)  # type: ignore[arg-type]
        counted = re.fullmatch(r"(\d+) ?(steps?|epochs?)?", words)
        if counted:
            amount = int(counted[1])
            return (
                cls("steps" if (counted[2] or "").startswith("step") else "epochs", amount)
                if amount
                else cls("end")
            )
        try:
            return cls("seconds", seconds_from(words))
        except ConfigError:
            raise ConfigError(
                f"checkpoint.every={text!r} is not an interval", fix=f"give it as {_EXAMPLES}"
            ) from None


def seconds_from(text: str) -> float:
    """Read a time.

    >>> seconds_from("30s"), seconds_from("1.5h"), seconds_from("02:00:00"), seconds_from("90")
    (30.0, 5400.0, 7200.0, 90.0)
    """
    words = text.strip().lower()
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d)", words)
    if clock:
        return int(clock[1] or 0) * 3600.0 + int(clock[2]) * 60.0 + int(clock[3])
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)?", words)
    if not found or float(found[1]) <= 0:
        raise ConfigError(f"{text!r} is not a time", fix="give it as 30s, 10m, 2h or HH:MM:SS")
    return float(found[1]) * _SECONDS[found[2] or "s"]
