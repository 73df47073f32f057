"""All that a report says of runs, as JSON has it: docs/report.md lists the keys."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config.values import from_toml
from paceline.redact import without_logins, without_secrets
from paceline.report.find_run import NamedRun
from paceline.report.history import as_number, metrics_in
from paceline.report.page.downsample import Curve, downsample
from paceline.report.page.event_columns import EventColumns, as_count, read_event_columns
from paceline.report.page.rank_map import rank_times_of
from paceline.report.page.saved_studies import environment_of, scaling_of, verdict_of
from paceline.report.page.steptime import breakdown, pace
from paceline.report.state import RunState, RunWatcher
from paceline.telemetry.stragglers import find_straggler, read_beats
from paceline.version import VERSION

_POINTS = 24_000  # of all curves together: more would make a page of several MB
_FEWEST, _MOST = 40, 400
_FIGURES = ("loss", "lr", "samples_per_s", "mfu")


def report_data(targets: Sequence[NamedRun]) -> dict[str, Any]:
    """Return what is known of runs."""
    accounts = [read_event_columns(target.folder.events) for target in targets]
    curves = sum(len(_FIGURES) + len(metrics_of(account)) for account in accounts)
    columns = max(_FEWEST, min(_MOST, _POINTS // max(1, curves)))
    runs = [
        _run(target, account, columns) for target, account in zip(targets, accounts, strict=True)
    ]
    return {"paceline": VERSION, "made_s": time.time(), "runs": runs}


def metrics_of(account: EventColumns) -> list[str]:
    """Return the names of all metrics of the evaluations, in the order in which they came."""
    return list(
        dict.fromkeys(str(name) for event in account.evaluations for name in metrics_in(event))
    )


def _run(target: NamedRun, account: EventColumns, columns: int) -> dict[str, Any]:
    state, folder = RunWatcher(target).look(), target.folder
    beats = read_beats(
        folder.beat(0).parent, state.world_size, as_number(account.started.get("time_s"), 0.0)
    )
    ranks = [
        beat for beat in beats if math.isfinite(as_number(beat.own_s) + as_number(beat.data_s))
    ]
    times, slow = (
        pace(account),
        find_straggler(ranks, as_count(account.started.get("lanes")), state.world_size),
    )
    found = _course(state, account) | {
        "curves": _curves(account, columns),
        "metric_curves": {
            name: _metric(account, name, columns).facts() for name in metrics_of(account)
        },
        "step_time": times,
        "breakdown": breakdown(times, ranks),
        "ranks": [asdict(beat) for beat in ranks],
        "slowest": asdict(slow) if slow else None,
        "rank_times": rank_times_of(folder.rank_times),
        "slow_ranks": [_slow(event) for event in account.slow],
        "starts": [
            asdict(start) | {"reason": without_logins(start.reason)} for start in account.starts
        ],
        "checkpoints": [_save(event) for event in account.saves],
        "troubles": [_trouble(event) for event in account.troubles],
        "scaling": scaling_of(folder.scaling),
        "profile": verdict_of(folder.verdict),
        "config": config_of(folder.config),
        "environment": environment_of(folder.environment),
    }
    return {key: _plain(value) for key, value in found.items()}


def _course(state: RunState, account: EventColumns) -> dict[str, Any]:
    started, newest = account.started, account.evaluations[-1] if account.evaluations else {}
    return {
        "name": state.name,
        "folder": state.folder,
        "phase": state.phase,
        "reason": without_logins(state.reason),
        "hang": asdict(state.hang) if state.hang else None,
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": state.loss,
        "metrics": {name: as_number(value) for name, value in metrics_in(newest).items()},
        "metrics_step": as_count(newest.get("step")) if newest else None,
        "world_size": state.world_size,
        "device": state.device,
        "launcher": str(started.get("launcher", "")),
        "summary": without_logins(str(started.get("summary", ""))),
        "trained_s": sum(start.last_s - start.time_s for start in account.starts),
        "restarts": max(0, len(account.starts) - 1),
        "lost_steps": sum(start.lost_steps for start in account.starts),
        "digest": account.digest,
    }


def _curves(account: EventColumns, columns: int) -> dict[str, Any]:
    """Return the curves of the figures; a run too short for step events has those of its epochs."""
    steps = account.steps
    if len(steps["step"]) < 2 <= len(account.epochs):
        return {
            name: _of_epochs(account, name, columns).facts() for name in ("loss", "samples_per_s")
        }
    shown = [name for name in _FIGURES if name != "mfu" or any(value > 0 for value in steps["mfu"])]
    return {name: downsample(steps["step"], steps[name], columns).facts() for name in shown}


def _of_epochs(account: EventColumns, name: str, columns: int) -> Curve:
    steps = [float(as_count(epoch.get("step"))) for epoch in account.epochs]
    return downsample(steps, [as_number(epoch.get(name)) for epoch in account.epochs], columns)


def _metric(account: EventColumns, name: str, columns: int) -> Curve:
    told = [event for event in account.evaluations if name in metrics_in(event)]
    steps = [float(as_count(event.get("step"))) for event in told]
    return downsample(steps, [as_number(metrics_in(event)[name]) for event in told], columns)


def _save(event: dict[str, Any]) -> dict[str, Any]:
    figures = {name: as_number(event.get(name)) for name in ("time_s", "held_s", "total_s")}
    counts = {name: as_count(event.get(name)) for name in ("step", "size_bytes")}
    return counts | figures | {"path": without_logins(str(event.get("path", "")))}


def _trouble(event: dict[str, Any]) -> dict[str, Any]:
    facts = {
        "event": str(event["event"]),
        "time_s": as_number(event.get("time_s")),
        "step": as_count(event.get("step")),
    }
    return facts | {"reason": without_logins(str(event.get("reason", "")))}


def _slow(event: dict[str, Any]) -> dict[str, Any]:
    figures = {name: as_number(event.get(name)) for name in ("time_s", "more_s", "times")}
    counts = {name: as_count(event.get(name)) for name in ("step", "rank")}
    return (
        counts
        | figures
        | {name: str(event.get(name, "")) for name in ("node", "phase", "kind", "sentence")}
    )


def config_of(path: Path) -> dict[str, Any]:
    """Return the settings by their dotted names, without secrets."""
    try:
        return without_secrets(from_toml(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """Return the same with null for what JSON has no number for, and plain values only."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
