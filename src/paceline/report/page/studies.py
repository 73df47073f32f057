"""Results of `paceline scale` and `paceline profile` that were saved beside a run: read with care, then drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.measure.efficiency import Scaling
from paceline.measure.profile_shares import KINDS
from paceline.measure.scaling_page import study_charts, study_table
from paceline.measure.scaling_report import remarks
from paceline.measure.scaling_store import read_studies
from paceline.plot.markup import NOTHING, Html, joined, tag
from paceline.plot.page import Charts
from paceline.redact import without_logins, without_secrets
from paceline.report.history import as_count, as_number
from paceline.report.page.step_times import bar, legend_of, name_of
from paceline.safe_open import read_json as read_json_file
from paceline.units import short_time

_MOST = 64  # ranks or causes that are read from a file
_MOST_BARS = 16  # ranks of a profile


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an unreadable one counts as empty."""
    try:
        content = read_json_file(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def scaling_of(path: Path) -> dict[str, Any] | None:
    """Return the studies of `paceline scale` by their kind, without secrets."""
    studies = read_studies(path)
    return {kind: without_secrets(study.as_dict()) for kind, study in studies.items()} or None


def verdict_of(path: Path) -> dict[str, Any] | None:
    """Return the verdict of `paceline profile`: the keys in docs/profile.md, nothing else."""
    content = read_json(path)
    seconds, step_s = _seconds_by_kind(content.get("seconds")), _finite(content.get("step_s"))
    if not seconds or not step_s or step_s <= 0:
        return None
    slow = content.get("slow_rank")
    causes = [cause for cause in _list(content.get("causes")) if isinstance(cause, dict)]
    return {
        **{name: _text(content.get(name)) for name in ("script", "device", "words")},
        **{name: as_count(content.get(name)) for name in ("ranks", "steps", "decisive_rank")},
        "step_s": step_s,
        "seconds": seconds,
        "shares": _seconds_by_kind(content.get("shares")),
        "waiting_for_slowest_s": _finite(content.get("waiting_for_slowest_s")),
        "per_rank": [_seconds_by_kind(rank) for rank in _list(content.get("per_rank"))],
        "slow_rank": _slow_rank(slow) if isinstance(slow, dict) else None,
        "causes": [_cause(cause) for cause in causes],
        "sentences": [_text(line) for line in _list(content.get("sentences"))],
    }


def _seconds_by_kind(value: Any) -> dict[str, float]:
    seconds = {}
    if isinstance(value, dict):
        for kind in KINDS:
            amount = _finite(value.get(kind))
            if amount is not None and amount >= 0:
                seconds[kind] = amount
    return seconds


def _cause(cause: dict[str, Any]) -> dict[str, Any]:
    texts = {name: _text(cause.get(name)) for name in ("cause", "what", "try")}
    return texts | {"seconds": _finite(cause.get("seconds"))}


def _slow_rank(slow: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": as_count(slow.get("rank")),
        "phase": _text(slow.get("phase")),
        "more_s": _finite(slow.get("more_s")),
        "times": _finite(slow.get("times")),
    }


def _text(value: Any) -> str:
    return without_logins(value) if isinstance(value, str) else ""


def _finite(value: Any) -> float | None:
    number = as_number(value)
    return number if math.isfinite(number) and abs(number) < 1e12 else None


def _list(value: Any) -> Sequence[Any]:
    return value[:_MOST] if isinstance(value, list) else []


def scaling(run: Mapping[str, Any], charts: Charts) -> Html:
    """Return speed-up, efficiency and the table of every scaling study of a run."""
    parts: list[Html] = []
    for content in (run["scaling"] or {}).values():
        study = Scaling.from_dict(content)
        parts += study_charts(study, run["color"], charts)
        parts.append(study_table(study, remarks(study), run["name"]))
    return joined(*parts)


def profile(run: Mapping[str, Any]) -> Html:
    """Return where a profile found the time of a step, and what to try."""
    verdict = run["profile"]
    if not verdict:
        return NOTHING
    head = tag("figcaption", tag("h3", "Profile"), tag("span", run["name"], class_="unit"))
    sentences = []
    for place, sentence in enumerate(verdict["sentences"]):
        sentences.append(tag("p", sentence, class_="note" if place else None))
    causes = []
    for cause in verdict["causes"]:
        advice = f" {_share(cause['seconds'], verdict['step_s'])}. Try: {cause['try']}"
        causes.append(tag("li", tag("b", cause["what"]), advice))
    below = tag("ol", *causes, class_="causes") if causes else NOTHING
    return tag("figure", head, *sentences, *_profile_bars(verdict), below, class_="chart wide")


def _profile_bars(verdict: Mapping[str, Any]) -> list[Html]:
    """Return one bar per rank, all on one scale; with very many ranks, the decisive one alone."""
    ranks = verdict["per_rank"]
    if not 1 < len(ranks) <= _MOST_BARS:
        ranks = [verdict["seconds"]]
    longest = max([sum(seconds.values()) for seconds in ranks] + [1e-12])
    if len(ranks) == 1:
        return [_profile_bar("", ranks[0], longest, explained=True)]
    rows = []
    for rank, seconds in enumerate(ranks):
        name = f"rank {rank}"
        if rank == verdict["decisive_rank"]:
            name += ", waits least"
        rows.append(_profile_bar(name, seconds, longest))
    return [*rows, legend_of(list(ranks[0]))]


def _profile_bar(
    name: str, seconds: Mapping[str, float], longest: float, *, explained: bool = False
) -> Html:
    shares = {kind: value / longest for kind, value in seconds.items()}
    texts = [f"{name_of(kind)} {short_time(value)}" for kind, value in seconds.items()]
    return bar(name, shares, texts, explained=explained)


def _share(seconds: float | None, step_s: float) -> str:
    return "" if seconds is None else f"{short_time(seconds)}, {seconds / step_s:.0%} of a step"
