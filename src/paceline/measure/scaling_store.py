"""The scaling studies of a run in one file: written atomically, validated when read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.measure.efficiency import Scaling, Size
from paceline.rundir import write_whole
from paceline.safe_open import read_json

_KINDS = ("strong", "weak")
_MOST_SIZES = 64


def write_studies(path: Path, studies: Mapping[str, Scaling]) -> None:
    """Write studies by their kind, in the format of docs/scale.md."""
    content = {"format": 1, "studies": {kind: study.as_dict() for kind, study in studies.items()}}
    write_whole(path, f"{json.dumps(content, indent=2)}\n".encode())


def read_studies(path: Path) -> dict[str, Scaling]:
    """Return the studies by their kind; an unreadable file has none."""
    try:
        content = read_json(path)["studies"]
        studies = {kind: _study(content[kind]) for kind in _KINDS if kind in content}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {kind: study for kind, study in studies.items() if study is not None}


def _study(content: Any) -> Scaling | None:
    sizes = content.get("sizes") if isinstance(content, dict) else None
    if not isinstance(sizes, list) or not _is_valid(Scaling, content):
        return None
    objects = [size for size in sizes[:_MOST_SIZES] if isinstance(size, dict)]
    valid = [size for size in objects if _is_valid(Size, size)]
    return Scaling.from_dict(content | {"sizes": valid}) if valid else None


def _is_valid(kind: type[Scaling | Size], content: Mapping[str, Any]) -> bool:
    """Return whether every field is present and has its type."""
    for field in fields(kind):
        is_type = _CHECKS[str(field.type)]
        if field.name not in content or not is_type(content[field.name]):
            return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} and math.isfinite(value) and abs(value) < 1e12


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
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
