"""The parts of a report that are read rather than looked at: figures at a glance, and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.report.page.markup import Html, joined, tag
from paceline.units import human_loss, human_time, short_time

_LONGEST = 400  # letters of a setting
_METRICS = 4


def card(run: Mapping[str, Any], *, several: bool) -> Html:
    """Return a run at a glance."""
    name = (
        (tag("i", class_=f"key c{run['color']}"), run["name"])
        if several
        else (tag("span", run["folder"]),)
    )
    head = tag("h2", *name)
    state = tag("span", run["phase"], class_=f"badge {run['phase'].replace(' ', '-')}")
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _glance(run) if value]
    held = run["hang"]["sentence"] if run["hang"] else ""
    why = [tag("p", words[:300], class_="reason") for words in (run["reason"], held) if words]
    return tag("article", tag("header", head, state), *why, tag("dl", *facts), class_="card")


def _glance(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    times, lost = run["step_time"], run["lost_steps"]
    metrics = [
        (name, human_loss(value))
        for name, value in run["metrics"].items()
        if value is not None and name != "eval_loss"
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


def comparison(runs: Sequence[Mapping[str, Any]], key: str, title: str) -> Html:
    """Return settings as a table with a column a run; those that differ come first, in the open."""
    names = list(dict.fromkeys(name for run in runs for name in run[key]))
    if not names:
        return Html("")
    differ = [name for name in names if len({_shown(run, key, name) for run in runs}) > 1]
    first = (
        joined(tag("h3", f"{title} that differ"), _table(runs, key, differ)) if differ else Html("")
    )
    rest = tag("details", tag("summary", f"{title} ({len(names)})"), _table(runs, key, names))
    return joined(first, rest)


def _table(runs: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> Html:
    rows = [
        tag("tr", tag("th", name), *(tag("td", _shown(run, key, name)) for run in runs))
        for name in names
    ]
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
