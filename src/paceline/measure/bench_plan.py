"""What `paceline bench` measures: operations, message sizes and duration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.errors import ConfigError, did_you_mean

ELEMENT_BYTES = 4
_UNITS = {
    "": 1,
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_DEFAULT_SIZES = "1KiB:16MiB"
_STEP = 4
_MOST_BYTES = 64 << 30

# As nccl-tests defines it: what the busiest link carries, as a share of the message.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "tree": lambda ranks: 2 * (ranks - 1) / ranks,
    "pair": lambda ranks: float(ranks > 1),
}

OPERATIONS = {
    "all-reduce": "the backend's sum, on every rank",
    "all-gather": "every rank gets the pieces of all ranks",
    "reduce-scatter": "every rank gets its piece of the sum",
    "all-to-all": "every rank sends a piece to every rank",
    "tree": "Paceline's sum along the fixed tree, as in training",
    "pair": "the first and the last rank send to each other; the time is one way",
}


@dataclass(frozen=True)
class BenchPlan:
    """The measurement that all ranks carry out."""

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    seconds: float = 20.0
    """How long to measure, after the first three rounds."""
    device: str = "auto"
    backend: str = "auto"
    to: str = ""
    """The file into which rank 0 writes the measurement; empty: none."""

    def as_json(self) -> str:
        """Return the plan as an argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchPlan:
        """Return the plan in an argument."""
        content = json.loads(text)
        for name in ("operations", "sizes_bytes"):
            content[name] = tuple(content[name])
        return cls(**content)


def operations_from(text: str) -> tuple[str, ...]:
    """Return the operations of a comma-separated list; an empty one means all.

    >>> operations_from("pair, tree")
    ('pair', 'tree')
    """
    names = [name.strip() for name in text.split(",")] if text else list(OPERATIONS)
    for name in names:
        if name not in OPERATIONS:
            raise ConfigError(
                f"--ops: unknown operation {name!r}", fix=did_you_mean(name, OPERATIONS)
            )
    return tuple(dict.fromkeys(names))


def sizes_from(text: str) -> tuple[int, ...]:
    """Return the sizes of a comma-separated list, or of a range by factors of 4; empty: the default range.

    >>> sizes_from("4kB, 1MB"), sizes_from("64:1KiB")
    ((4000, 1000000), (64, 256, 1024))
    """
    first, colon, last = (text or _DEFAULT_SIZES).partition(":")
    if not colon:
        return tuple(sorted({_size(size) for size in first.split(",")}))
    size, largest = _size(first), _size(last)
    if size > largest:
        raise ConfigError(
            f"--sizes {text}: the first size is larger than the last",
            fix=f"swap them: --sizes {last}:{first}",
        )
    sizes = []
    while size <= largest:
        sizes.append(size)
        size *= _STEP
    return tuple(sizes)


def _size(text: str) -> int:
    text = text.strip()
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ConfigError(
            f"--sizes: {text!r} is not a size",
            fix="give sizes such as 4kB, 1MiB, or a range: --sizes 1KiB:16MiB",
        )
    size = int(match[1]) * _UNITS[match[2]]
    if size > _MOST_BYTES:
        most = f"{_MOST_BYTES >> 30}GiB"
        raise ConfigError(
            f"--sizes: must be at most {most}, got {text}", fix=f"give {most} or less"
        )
    if size < ELEMENT_BYTES:
        raise ConfigError(
            f"--sizes: must be at least {ELEMENT_BYTES} bytes (one float32), got {text}",
            fix=f"give {ELEMENT_BYTES}B or more",
        )
    return size
