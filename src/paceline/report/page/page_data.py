"""All data of a report, as `paceline report --json` prints it; docs/report.md lists the keys."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from paceline.config.values import from_toml
from paceline.plot.downsample import downsample
from paceline.plot.line import Curve
from paceline.redact import without_logins, without_secrets
from paceline.report.find_run import NamedRun
from paceline.report.history import as_count, as_number, metrics_in
from paceline.report.page.event_columns import EventColumns, read_event_columns
from paceline.report.page.failure_section import failure_of
from paceline.report.page.goodput import goodput_of, restarts_of, verdict_of_run
from paceline.report.page.rank_map import rank_times_of
from paceline.report.page.step_strip import strip_from
from paceline.report.page.step_times import breakdown, step_time_distribution
from paceline.report.page.studies import read_json, scaling_of, verdict_of
from paceline.report.page.usage_charts import usage_of
from paceline.report.state import RunState, RunWatcher
from paceline.safe_open import read_text
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.stragglers import find_straggler, read_beats
from paceline.version import VERSION

_POINTS = 24_000  # of all curves together: more would make a page of several MB
_FEWEST, _MOST = 40, 400  # points of a curve
_CURVES = ("loss", "lr", "samples_per_s", "mfu")


def report_data(targets: Sequence[NamedRun]) -> dict[str, Any]:
    """Return the data of runs, their curves downsampled so that a page stays small."""
    by_run = [read_event_columns(target.folder.events) for target in targets]
    curves = sum(len(_CURVES) + len(metrics_of(columns)) for columns in by_run)
    points = max(_FEWEST, min(_MOST, _POINTS // max(1, curves)))
    runs = [_run(target, columns, points) for target, columns in zip(targets, by_run, strict=True)]
    return {"paceline": VERSION, "made_s": time.time(), "runs": runs}


def metrics_of(columns: EventColumns) -> list[str]:
    """Return the names of all evaluation metrics, first seen first."""
    names: dict[str, None] = {}
    for event in columns.evaluations:
        names |= dict.fromkeys(map(str, metrics_in(event)))
    return list(names)


def _run(target: NamedRun, columns: EventColumns, points: int) -> dict[str, Any]:
    state, folder = RunWatcher(target).look(), target.folder
    beats = _beats(target, columns, state.world_size)
    lanes = as_count(columns.started.get("lanes"))
    slow = find_straggler(beats, lanes, state.world_size)
    times = step_time_distribution(columns)
    metrics = {name: _metric(columns, name, points) for name in metrics_of(columns)}
    data = _progress(state, columns) | {
        "curves": _curves(columns, points),
        "clock": _clock(columns, points),
        "metric_curves": {name: curve.as_dict() for name, curve in metrics.items()},
        "step_time": times,
        "breakdown": breakdown(times, beats),
        "ranks": [asdict(beat) for beat in beats],
        "slowest": asdict(slow) if slow else None,
        "rank_times": rank_times_of(folder.rank_times),
        "usage": usage_of(folder.rank_times),
        "slow_ranks": [_slow_rank(event) for event in columns.slow],
        "starts": [_start(asdict(start)) for start in columns.starts],
        "restarts_because": restarts_of(columns),
        "goodput": goodput_of(columns),
        "failure": failure_of(folder.failure),
        "checkpoints": [_checkpoint(event) for event in columns.saves],
        "troubles": [_problem(event) for event in columns.problems],
        "scaling": scaling_of(folder.scaling),
        "profile": verdict_of(folder.verdict),
        "profile_step": strip_from(folder.profile_step),
        "config": (config := config_of(folder.config)),
        "set_by_script": columns.set_by_script(config),
        "environment": environment_of(folder.environment),
    }
    data["verdict"] = verdict_of_run(data)
    return {name: _plain(value) for name, value in data.items()}


def _beats(target: NamedRun, columns: EventColumns, ranks: int) -> list[Beat]:
    """Return the beats of the last start whose times are finite."""
    started_s = as_number(columns.started.get("time_s"), 0.0)
    beats = read_beats(target.folder.beat(0).parent, ranks, started_s)
    return [beat for beat in beats if math.isfinite(as_number(beat.own_s) + as_number(beat.data_s))]


def _progress(state: RunState, columns: EventColumns) -> dict[str, Any]:
    started = columns.started
    newest = columns.evaluations[-1] if columns.evaluations else {}
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
        "trained_s": sum(start.last_s - start.time_s for start in columns.starts),
        "restarts": max(0, len(columns.starts) - 1),
        "lost_steps": sum(start.lost_steps for start in columns.starts),
        "digest": columns.digest,
    }


def _curves(columns: EventColumns, points: int) -> dict[str, Any]:
    """Return curves by steps; a run that is too short for step events has curves by epochs."""
    steps, curves = columns.steps, {}
    if len(steps["step"]) < 2 <= len(columns.epochs):
        for name in ("loss", "samples_per_s"):
            curves[name] = _by_epochs(columns, name, points).as_dict()
        return curves
    for name in _CURVES:
        if name != "mfu" or any(value > 0 for value in steps["mfu"]):
            curves[name] = downsample(steps["step"], steps[name], points).as_dict()
    return curves


def _clock(columns: EventColumns, points: int) -> dict[str, list[float]] | None:
    """Return when each of some steps was done, in seconds since the first start, and how many samples it had seen."""
    if not columns.starts:
        return None
    begun_s = columns.starts[0].time_s
    steps, times = list(columns.steps["step"]), list(columns.steps["time_s"])
    for event in columns.evaluations:
        steps.append(float(as_count(event.get("step"))))
        times.append(as_number(event.get("time_s")))
    curve = downsample([0.0, *steps], [0.0, *(time_s - begun_s for time_s in times)], points)
    known = [(step, s) for step, s in zip(curve.steps, curve.high, strict=True) if s is not None]
    at = [step for step, _ in known]
    return {
        "steps": at,
        "time_s": [seconds for _, seconds in known],
        "samples": _samples_at(at, columns),
    }


def _samples_at(steps: Sequence[float], columns: EventColumns) -> list[float]:
    """Return the samples of all steps until some; the last step of an epoch may have fewer than the others."""
    batch = as_number(columns.started.get("global_batch"), 0.0)
    seen, counted = columns.steps["step"], columns.steps["samples"]
    if not seen or not all(map(math.isfinite, counted)):
        return [step * batch for step in steps]
    counts = numpy.interp(steps, [0.0, *seen], [0.0, *counted])
    return [float(round(count)) for count in counts]


def _by_epochs(columns: EventColumns, name: str, points: int) -> Curve:
    steps = [float(as_count(epoch.get("step"))) for epoch in columns.epochs]
    values = [as_number(epoch.get(name)) for epoch in columns.epochs]
    return downsample(steps, values, points)


def _metric(columns: EventColumns, name: str, points: int) -> Curve:
    steps, values = [], []
    for event in columns.evaluations:
        metrics = metrics_in(event)
        if name in metrics:
            steps.append(float(as_count(event.get("step"))))
            values.append(as_number(metrics[name]))
    return downsample(steps, values, points)


def _start(start: dict[str, Any]) -> dict[str, Any]:
    return start | {"reason": without_logins(start["reason"])}


def _checkpoint(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": as_count(event.get("step")),
        "size_bytes": as_count(event.get("size_bytes")),
        "time_s": as_number(event.get("time_s")),
        "held_s": as_number(event.get("held_s")),
        "total_s": as_number(event.get("total_s")),
        "path": without_logins(str(event.get("path", ""))),
    }


def _problem(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "event": str(event["event"]),
        "time_s": as_number(event.get("time_s")),
        "step": as_count(event.get("step")),
        "reason": without_logins(str(event.get("reason", ""))),
    }


def _slow_rank(event: dict[str, Any]) -> dict[str, Any]:
    texts = {name: str(event.get(name, "")) for name in ("node", "phase", "kind", "sentence")}
    return {
        "step": as_count(event.get("step")),
        "rank": as_count(event.get("rank")),
        "time_s": as_number(event.get("time_s")),
        "more_s": as_number(event.get("more_s")),
        "times": as_number(event.get("times")),
    } | texts


def config_of(path: Path) -> dict[str, Any]:
    """Return the settings by their dotted names, without secrets."""
    try:
        return without_secrets(from_toml(tomllib.loads(read_text(path))))
    except (OSError, ValueError, RecursionError):
        return {}


def environment_of(path: Path) -> dict[str, str]:
    """Return versions, machine and environment variables of a run as one flat table, without secrets."""
    flat = {}
    for name, value in without_secrets(read_json(path)).items():
        if not isinstance(value, dict):
            flat[str(name)] = str(value)
            continue
        prefix = "" if name == "variables" else f"{name}."
        for inner, content in value.items():
            flat[f"{prefix}{inner}"] = str(content)
    return flat


def _plain(value: Any) -> Any:
    """Return only values that JSON has; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
