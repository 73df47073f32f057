"""What other verbs have measured of a run and left beside it: how it scales, and where its time goes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.measure.profile_shares import KINDS
from paceline.measure.scaling_store import read_studies
from paceline.redact import without_logins, without_secrets
from paceline.report.history import as_number
from paceline.report.page.event_columns import as_count

_LARGEST_BYTES = 1 << 20
_MOST = 64  # ranks or causes that are taken from a file


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; nothing if there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def scaling_of(path: Path) -> dict[str, Any] | None:
    """Return the studies of `paceline scale` by their kind, as it has them, without secrets."""
    return {
        kind: without_secrets(study.as_dict()) for kind, study in read_studies(path).items()
    } or None


def verdict_of(path: Path) -> dict[str, Any] | None:
    """Return the verdict of `paceline profile`: what docs/profile.md names, and nothing else."""
    found = read_json(path)
    seconds, step_s = _kinds(found.get("seconds")), _finite(found.get("step_s"))
    if not seconds or not step_s or step_s <= 0:
        return None
    slow, lists = (
        found.get("slow_rank"),
        {name: _list(found.get(name)) for name in ("causes", "per_rank", "sentences")},
    )
    return {
        **{name: _text(found.get(name)) for name in ("script", "device", "words")},
        **{name: as_count(found.get(name)) for name in ("ranks", "steps", "decisive_rank")},
        "step_s": step_s,
        "seconds": seconds,
        "shares": _kinds(found.get("shares")),
        "waiting_for_slowest_s": _finite(found.get("waiting_for_slowest_s")),
        "per_rank": [_kinds(each) for each in lists["per_rank"]],
        "slow_rank": _slow(slow) if isinstance(slow, dict) else None,
        "causes": [_cause(cause) for cause in lists["causes"] if isinstance(cause, dict)],
        "sentences": [_text(line) for line in lists["sentences"]],
    }


def _kinds(value: Any) -> dict[str, float]:
    """Return what is known of each kind of time; nothing below 0."""
    found = {kind: _finite(value.get(kind)) for kind in KINDS} if isinstance(value, dict) else {}
    return {kind: amount for kind, amount in found.items() if amount is not None and amount >= 0}


def _cause(cause: dict[str, Any]) -> dict[str, Any]:
    return {name: _text(cause.get(name)) for name in ("cause", "what", "try")} | {
        "seconds": _finite(cause.get("seconds"))
    }


def _slow(slow: dict[str, Any]) -> dict[str, Any]:
    figures = {name: _finite(slow.get(name)) for name in ("more_s", "times")}
    return {"rank": as_count(slow.get("rank")), "phase": _text(slow.get("phase"))} | figures


def _text(value: Any) -> str:
    return without_logins(value) if isinstance(value, str) else ""


def environment_of(path: Path) -> dict[str, str]:
    """Return what a run was started on, flat, without secrets."""
    found = without_secrets(read_json(path))
    flat = {name: value for name, value in found.items() if not isinstance(value, dict)}
    for group, values in found.items():
        if isinstance(values, dict):
            flat |= {
                name if group == "variables" else f"{group}.{name}": value
                for name, value in values.items()
            }
    return {str(name): str(value) for name, value in flat.items()}


def _finite(value: Any) -> float | None:
    found = as_number(value)
    return found if math.isfinite(found) and abs(found) < 1e12 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:_MOST] if isinstance(value, list) else []
