"""What other verbs have measured of a run and left beside it: how it scales, and where its time goes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.redact import without_logins, without_secrets
from paceline.report.account import number, whole

_LARGEST_BYTES = 1 << 20
_MOST = 64  # points, shares or causes that are taken from a file
_POINT = ("step_s", "samples_per_s", "speedup", "efficiency", "exposed_share", "data_share")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; nothing if there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def scaling_of(path: Path) -> dict[str, Any] | None:
    """Return the speed at several world sizes, smallest first: what `docs/report.md` names, and nothing else."""
    found = read_json(path)
    points = [_point(point) for point in _list(found.get("points")) if isinstance(point, dict)]
    points = sorted((point for point in points if point["ranks"]), key=lambda point: int(point["ranks"]))
    return {"mode": str(found.get("mode", "strong")), "points": points} if points else None


def _point(point: dict[str, Any]) -> dict[str, Any]:
    return {"ranks": whole(point.get("ranks"))} | {name: _finite(point.get(name)) for name in _POINT}


def verdict_of(path: Path) -> dict[str, Any] | None:
    """Return where the time goes, by a profile."""
    found = read_json(path)
    shares = found.get("shares")
    taken = list(shares.items())[:_MOST] if isinstance(shares, dict) else []
    parts = {str(name): share for name, value in taken if (share := _finite(value)) is not None and share >= 0}
    causes = [_cause(cause) for cause in _list(found.get("causes")) if isinstance(cause, dict)]
    summary = without_logins(str(found.get("summary", "")))
    return {"summary": summary, "shares": parts, "causes": causes} if parts or summary else None


def _cause(cause: dict[str, Any]) -> dict[str, Any]:
    words = {name: without_logins(str(cause.get(name, ""))) for name in ("name", "try")}
    return words | {"share": _finite(cause.get("share"))}


def environment_of(path: Path) -> dict[str, str]:
    """Return what a run was started on, flat, without secrets."""
    found = without_secrets(read_json(path))
    flat = {name: value for name, value in found.items() if not isinstance(value, dict)}
    for group, values in found.items():
        if isinstance(values, dict):
            flat |= {name if group == "variables" else f"{group}.{name}": value for name, value in values.items()}
    return {str(name): str(value) for name, value in flat.items()}


def _finite(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) and abs(found) < 1e12 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:_MOST] if isinstance(value, list) else []
