"""Which studies of scaling a run has: one file, written whole, and read with care, as anybody may have changed it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.measure.efficiency import Scaling, Size
from paceline.rundir import write_whole

_KINDS = ("strong", "weak")
_LARGEST_BYTES = 1 << 20
_MOST_SIZES = 64


def write_studies(path: Path, studies: Mapping[str, Scaling]) -> None:
    """Write studies by their kind; docs/scale.md says what is in the file."""
    content = {"format": 1, "studies": {kind: study.as_dict() for kind, study in studies.items()}}
    write_whole(path, f"{json.dumps(content, indent=2)}\n".encode())


def read_studies(path: Path) -> dict[str, Scaling]:
    """Return the studies by their kind; what cannot be read counts as none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_BYTES))["studies"]
        studies = {kind: _study(found[kind]) for kind in _KINDS if kind in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {kind: study for kind, study in studies.items() if study is not None}


def _study(found: Any) -> Scaling | None:
    sizes = found.get("sizes") if isinstance(found, dict) else None
    if not isinstance(sizes, list) or not _is_sound(Scaling, found):
        return None
    sound = [
        size for size in sizes[:_MOST_SIZES] if isinstance(size, dict) and _is_sound(Size, size)
    ]
    return Scaling.from_dict(found | {"sizes": sound}) if sound else None


def _is_sound(kind: type[Scaling | Size], found: Mapping[str, Any]) -> bool:
    """Return whether all that is needed is there, each of its type."""
    return all(
        field.name in found and _SOUND[str(field.type)](found[field.name]) for field in fields(kind)
    )


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} and math.isfinite(value) and abs(value) < 1e12


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < 1e12,
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "list[str]": lambda value: (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
    "list[float]": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "list[Size]": lambda value: isinstance(value, list),
    "dict[str, Any]": lambda value: isinstance(value, dict),
}
