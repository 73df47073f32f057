"""The parts of a report that are read rather than looked at: figures at a glance, scaling, profile, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.amounts import human_loss, human_time, short_time
from paceline.report.markup import Html, joined, tag
from paceline.report.plot import Charts, Line
from paceline.report.thin import Curve
from paceline.report.timing import bar

_LONGEST = 400  # letters of a setting
_METRICS = 4
_ENOUGH = 0.75  # the efficiency that computing centres ask for


def card(run: Mapping[str, Any], *, several: bool) -> Html:
    """Return a run at a glance."""
    name = (tag("i", class_=f"key c{run['color']}"), run["name"]) if several else (tag("span", run["folder"]),)
    head = tag("h2", *name)
    state = tag("span", run["phase"], class_=f"badge {run['phase'].replace(' ', '-')}")
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _glance(run) if value]
    reason = tag("p", run["reason"][:300], class_="reason") if run["reason"] else Html("")
    return tag("article", tag("header", head, state), reason, tag("dl", *facts), class_="card")


def _glance(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    times, lost = run["step_time"], run["lost_steps"]
    metrics = [
        (name, human_loss(value)) for name, value in run["metrics"].items() if value is not None and name != "eval_loss"
    ]
    eval_loss = run["metrics"].get("eval_loss")
    return [
        ("step", f"{run['step']:,} of {run['total_steps']:,}" if run["total_steps"] else ""),
        ("loss", human_loss(run["loss"]) if run["loss"] is not None else ""),
        ("evaluation loss", human_loss(eval_loss) if eval_loss is not None else ""),
        *metrics[:_METRICS],
        ("samples/s", f"{times['samples_per_s']:,.0f}" if times else ""),
        ("step time", short_time(times["median_s"]) if times else ""),
        ("trained for", human_time(run["trained_s"])),
        ("ranks", f"{run['world_size']:,} on {run['device']}" if run["world_size"] else ""),
        ("restarts", f"{run['restarts']:,}" if run["starts"] else ""),
        ("done again", f"{lost:,} steps" if lost else ""),
        ("checkpoints", f"{len(run['checkpoints']):,}"),
        ("weights", run["digest"][:12]),
    ]


def scaling(run: Mapping[str, Any], charts: Charts) -> Html:
    """Return how the speed grows with the number of ranks."""
    found = run["scaling"]
    if not found:
        return Html("")
    points = found["points"]
    ranks = [float(point["ranks"]) for point in points]
    lines = [
        Line("ideal", 7, _curve(ranks, [rank / ranks[0] for rank in ranks]), dashed=True),
        Line("measured", run["color"], _curve(ranks, [point["speedup"] for point in points])),
    ]
    chart = charts.add("Speed-up", f"over ranks, {found['mode']} scaling", lines, axis="ranks")
    heads = ("ranks", "step", "samples/s", "speed-up", "efficiency", "exposed", "data wait")
    rows = [tag("tr", *(tag("td", cell, class_="n") for cell in _scaled(point))) for point in points]
    table = tag(
        "table", tag("thead", tag("tr", *(tag("th", word) for word in heads))), tag("tbody", *rows), class_="plain"
    )
    kept = [point["ranks"] for point in points if (point["efficiency"] or 0) >= _ENOUGH]
    note = "exposed: share of communication that is waited for"
    note += f"; efficiency is at least {_ENOUGH:.0%} up to {max(kept)} ranks" if kept else ""
    return joined(
        chart, tag("figure", tag("div", table, class_="scroll"), tag("p", note, class_="note"), class_="chart")
    )


def _curve(x: list[float], y: list[float | None] | list[float]) -> Curve:
    values = list[float | None](y)
    return Curve(x, values, values, values, 0)


def _scaled(point: Mapping[str, Any]) -> list[str]:
    def share(name: str) -> str:
        return "" if point[name] is None else f"{point[name]:.1%}"

    return [
        f"{point['ranks']:,}",
        "" if point["step_s"] is None else short_time(point["step_s"]),
        "" if point["samples_per_s"] is None else f"{point['samples_per_s']:,.0f}",
        "" if point["speedup"] is None else f"{point['speedup']:.2f}",
        share("efficiency"), share("exposed_share"), share("data_share"),
    ]  # fmt: skip


def profile(run: Mapping[str, Any]) -> Html:
    """Return where the time goes, by a profile, and what to try."""
    found = run["profile"]
    if not found:
        return Html("")
    shares = found["shares"]
    spent = bar("", shares, [f"{name} {share:.0%}" for name, share in shares.items()]) if shares else Html("")
    causes = [
        tag(
            "li", tag("b", cause["name"]), "" if cause["share"] is None else f" {cause['share']:.0%}", " ", cause["try"]
        )
        for cause in found["causes"]
    ]
    head = tag("figcaption", tag("h3", "Profile"), tag("span", run["name"], class_="unit"))
    below = tag("ol", *causes) if causes else Html("")
    return tag("figure", head, tag("p", found["summary"]), spent, below, class_="chart wide")


def comparison(runs: Sequence[Mapping[str, Any]], key: str, title: str) -> Html:
    """Return settings as a table with a column a run; those that differ come first, in the open."""
    names = list(dict.fromkeys(name for run in runs for name in run[key]))
    if not names:
        return Html("")
    differ = [name for name in names if len({_shown(run, key, name) for run in runs}) > 1]
    first = joined(tag("h3", f"{title} that differ"), _table(runs, key, differ)) if differ else Html("")
    rest = tag("details", tag("summary", f"{title} ({len(names)})"), _table(runs, key, names))
    return joined(first, rest)


def _table(runs: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> Html:
    rows = [tag("tr", tag("th", name), *(tag("td", _shown(run, key, name)) for run in runs)) for name in names]
    head = tag("thead", tag("tr", tag("th", ""), *(tag("th", run["name"]) for run in runs)))
    return tag(
        "div",
        tag("table", head if len(runs) > 1 else Html(""), tag("tbody", *rows), class_="settings"),
        class_="scroll",
    )


def _shown(run: Mapping[str, Any], key: str, name: str) -> str:
    value = run[key].get(name, "")
    words = str(value).lower() if isinstance(value, bool) else str(value)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}… ({len(words):,} letters)"
