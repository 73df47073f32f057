"""Runs side by side: a card with verdict and main numbers of each, and tables of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plot.markup import NOTHING, Html, joined, table, tag
from paceline.report.page.origin import origin
from paceline.report.page.usage_charts import peak
from paceline.report.page.wall_time import restart_list, wall_time
from paceline.units import human_loss, human_time, short_time

_LONGEST = 400  # characters of a setting
_LONGEST_REASON = 300
_METRICS = 4
_PHASES = {"ended": "finished"}

Run = Mapping[str, Any]


def card(run: Run, *, several: bool) -> Html:
    """Return the verdict on a run, its main numbers, and what was run where."""
    if several:
        head = tag("h2", tag("i", class_=f"key c{run['color']}"), run["name"])
    else:
        head = tag("h2", tag("span", run["folder"]))
    phase: str = run["phase"]
    badge = tag("span", _PHASES.get(phase, phase), class_=f"badge {phase.replace(' ', '-')}")
    reasons: list[str] = [run["reason"], run["hang"]["sentence"] if run["hang"] else ""]
    notes = [tag("p", text[:_LONGEST_REASON], class_="reason") for text in reasons if text]
    return tag(
        "article",
        tag("header", head, badge),
        tag("p", run["verdict"], class_="verdict"),
        *notes,
        wall_time(run),
        restart_list(run),
        tag("dl", *_pairs(_numbers(run))),
        tag("dl", *_pairs(origin(run)), class_="origin"),
        class_="card",
    )


def _pairs(facts: Sequence[tuple[str, str]]) -> list[Html]:
    return [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value]


def _numbers(run: Run) -> list[tuple[str, str]]:
    """Return names and values; an unknown value is empty."""
    times, repeated = run["step_time"], run["lost_steps"]
    total, ranks = run["total_steps"], run["world_size"]
    return [
        ("step", f"{run['step']:,} of {total:,}" if total else ""),
        ("loss", _loss(run["loss"])),
        ("evaluation loss", _loss(run["metrics"].get("eval_loss"))),
        *_metrics(run)[:_METRICS],
        ("samples/s", f"{times['samples_per_s']:,.0f}" if times else ""),
        ("median step time", short_time(times["median_s"]) if times else ""),
        ("learning rate", _constant(run, "lr")),
        ("trained for", human_time(run["trained_s"])),
        ("ranks", f"{ranks:,} on {run['device']}" if ranks else ""),
        ("goodput", f"{run['goodput']['goodput']:.0%}" if run["goodput"] else ""),
        ("restarts", f"{run['restarts']:,}" if run["starts"] else ""),
        ("steps repeated", f"{repeated:,}" if repeated else ""),
        ("peak GPU memory", peak(run, "gpu_peak_bytes")),
        ("peak memory", peak(run, "memory_bytes")),
        ("checkpoints", f"{len(run['checkpoints']):,}"),
        ("weights", run["digest"][:12]),
    ]


def constant_of(run: Run, name: str) -> float | None:
    """Return the value of a curve that never changes; None for any other curve."""
    curve = run["curves"].get(name)
    values = {*curve["low"], *curve["high"]} if curve else set()
    return values.pop() if len(values) == 1 else None


def _constant(run: Run, name: str) -> str:
    value = constant_of(run, name)
    return "" if value is None else f"{value:g} (constant)"


def _metrics(run: Run) -> list[tuple[str, str]]:
    metrics = []
    for name, value in run["metrics"].items():
        if value is not None and name != "eval_loss":
            metrics.append((name, human_loss(value)))
    return metrics


def _loss(loss: float | None) -> str:
    return "" if loss is None else human_loss(loss)


def comparison(runs: Sequence[Run], part: str, title: str) -> Html:
    """Return a table with a column per run; settings that differ come first, unfolded."""
    names = list(dict.fromkeys(name for run in runs for name in run[part]))
    if not names:
        return NOTHING
    differ = [name for name in names if len({_value(run, part, name) for run in runs}) > 1]
    first = NOTHING
    if differ:
        first = joined(tag("h3", f"{title} that differ"), _table(runs, part, differ))
    summary = tag("summary", f"{title} ({len(names)})")
    return joined(first, tag("details", summary, _table(runs, part, names)))


def _table(runs: Sequence[Run], part: str, names: Sequence[str]) -> Html:
    rows = []
    for name in names:
        values = [tag("td", _value(run, part, name)) for run in runs]
        rows.append(tag("tr", tag("th", name), *values))
    head = ["", *(run["name"] for run in runs)] if len(runs) > 1 else []
    return table(head, rows, "settings")


def _value(run: Run, part: str, name: str) -> str:
    value = run[part].get(name, "")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if part == "config" and name in run["set_by_script"]:
        text = f"{run['set_by_script'][name]} (setting: {text})"
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text):,} characters)"
