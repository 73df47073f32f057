"""What `paceline bench` is to measure: which operations, on messages of which sizes, for how long."""

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

# By the definitions of nccl-tests: what crosses the busiest link, as a share of the message.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "tree": lambda ranks: 2 * (ranks - 1) / ranks,
    "pair": lambda ranks: float(ranks > 1),
}

OPERATIONS = {
    "all-reduce": "the backend's own sum, every rank has it",
    "all-gather": "every rank has the pieces of all",
    "reduce-scatter": "every rank has its slice of the sum",
    "all-to-all": "every rank has the pieces that all have for it",
    "tree": "Paceline's sum along the fixed tree, as training does it",
    "pair": "the first and the last rank send to and fro; the time is that of one way",
}


@dataclass(frozen=True)
class BenchPlan:
    """All that the ranks are told."""

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    seconds: float = 20.0
    """How long to go on, once everything was measured three times."""
    device: str = "auto"
    backend: str = "auto"
    to: str = ""
    """The file into which rank 0 writes what was measured; empty: none."""

    def as_json(self) -> str:
        """Return the plan as it is handed to the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchPlan:
        """Return the plan that was handed over."""
        found = json.loads(text)
        return cls(**found | {name: tuple(found[name]) for name in ("operations", "sizes_bytes")})


def operations_from(text: str) -> tuple[str, ...]:
    """Return the operations of a list; nothing stands for all.

    >>> operations_from("pair, tree")
    ('pair', 'tree')
    """
    names = [word.strip() for word in text.split(",")] if text else list(OPERATIONS)
    for name in names:
        if name not in OPERATIONS:
            raise ConfigError(
                f"--ops: there is no operation {name!r}", fix=did_you_mean(name, OPERATIONS)
            )
    return tuple(dict.fromkeys(names))


def sizes_from(text: str) -> tuple[int, ...]:
    """Return the sizes of a list, or of a range in steps of four; nothing stands for what shows most.

    >>> sizes_from("4kB, 1MB"), sizes_from("64:1KiB")
    ((4000, 1000000), (64, 256, 1024))
    """
    first, colon, last = (text or _DEFAULT_SIZES).partition(":")
    if not colon:
        return tuple(sorted({_size(word) for word in first.split(",")}))
    size, most = _size(first), _size(last)
    if size > most:
        raise ConfigError(
            f"--sizes {text} goes from large to small", fix=f"turn it round: --sizes {last}:{first}"
        )
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= _STEP
    return tuple(sizes)


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", word.strip())
    if not found or found[2] not in _UNITS:
        raise ConfigError(
            f"--sizes: {word.strip()!r} is not a size",
            fix="give sizes such as 4kB, 1MiB, or a range: --sizes 1KiB:16MiB",
        )
    size = int(found[1]) * _UNITS[found[2]]
    if size > _MOST_BYTES:
        raise ConfigError(
            f"--sizes: {word.strip()} is more than any message",
            fix=f"give at most {_MOST_BYTES >> 30}GiB",
        )
    if size < ELEMENT_BYTES:
        raise ConfigError(
            f"--sizes: {word.strip()} is less than one number of {ELEMENT_BYTES} bytes",
            fix="begin with 4B or more",
        )
    return size
