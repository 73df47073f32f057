"""What `paceline verify` has shown: records in the user's state folder, and what the start of a run says about its script."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.main_script import Sources
from paceline.rundir import make_private, write_whole
from paceline.safe_open import read_json
from paceline.terminal import plain

SCRIPT_FILE = "script.json"
"""What a recorded run says about its script, in the folder of its record."""

_LARGEST_BYTES = 1 << 22
_MOST = 100  # records
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
# Settings that say how long, where to and how fast a run trains, not what.
_FREE = {
    "name", "runs", "epochs", "steps", "resume", "stop_after", "evaluate_steps", "compare_steps", "device",
    "read.prefetch_steps", "read.cache", "read.cache_gb",
}  # fmt: skip
_FREE_TABLES = {"checkpoint", "log", "timeout", "record", "profile"}
_MOST_NAMES, _LONGEST_VALUE = 3, 40


def records_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's records.

    >>> records_file({"HOME": "/home/me"})
    PosixPath('/home/me/.local/state/paceline/verified.json')
    """
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME', '~')}/.local/state"
    return Path(state).expanduser() / "paceline" / "verified.json"


def facts_of(
    sources: Sources, config: RunConfig, versions: Mapping[str, str], device: str
) -> dict[str, Any]:
    """Return what identifies a script and its settings; the text of every file by its digest."""
    settings = {
        name: value
        for name, value in flatten(config)
        if name not in _FREE and name.partition(".")[0] not in _FREE_TABLES
    }
    settings |= {f"{name} version": value for name, value in versions.items()}
    settings["device"] = device.partition(":")[0]
    script = sources.script
    files = {
        "" if name == script.file_name else name: _digest(text)
        for name, text in sources.files.items()
    }
    facts = {
        "place": script.place,
        "project": script.project,
        "files": files,
        "settings": settings,
    }
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def save_facts(folder: Path, facts: Mapping[str, Any], sources: Sources) -> None:
    """Write what `remember` needs into the folder of a record, with digests that do not depend on comments."""
    code = {
        "" if name == sources.script.file_name else name: _code_digest(text)
        for name, text in sources.files.items()
    }
    make_private(folder)
    write_whole(folder / SCRIPT_FILE, json.dumps({**facts, "code": code}).encode(), durable=False)


def remember(folder: Path, worlds: Sequence[int]) -> None:
    """Keep that the run which was recorded in a folder had the same bits on these numbers of ranks."""
    file = records_file(os.environ)
    with contextlib.suppress(OSError, ValueError):
        new = read_json(folder / SCRIPT_FILE, _LARGEST_BYTES)
        new |= {"worlds": list(worlds), "time_s": time.time()}
        same = ("place", "project", "files", "settings")
        others = [old for old in _records(file) if any(old.get(key) != new[key] for key in same)]
        kept = [new, *others][:_MOST]
        while len(kept) > 1 and len(json.dumps(kept)) > _LARGEST_BYTES:
            kept.pop()
        make_private(file.parent)
        write_whole(file, json.dumps(kept).encode())


def what_is_shown(facts: Mapping[str, Any], sources: Sources) -> str:
    """Return what `paceline verify` has shown about this script, in one line; empty for what is not in a file."""
    script = sources.script
    if not script.place:
        return ""
    command = f"paceline verify {script.typed}"
    known = _records(records_file(os.environ))
    same = [record for record in known if _is_same_text(record, facts, sources)]
    if same:
        differing = [_differing(record["settings"], facts["settings"]) for record in same]
        best = min(range(len(same)), key=lambda number: len(differing[number]))
        names = differing[best]
        shown = f"verified on {', '.join(map(str, same[best]['worlds']))} ranks on {_day(same[best]['time_s'])}"
        if not names:
            return shown
        # The values with which it was verified, where this run has others.
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return f"{shown}, with {', '.join(names[:_MOST_NAMES])}{more}"
    for record in known:
        if (record["place"], record["project"]) == (facts["place"], facts["project"]):
            return f"changed since it was verified on {_day(record['time_s'])}: {command}"
    return f"not verified: {command}"


def _is_same_text(record: Mapping[str, Any], facts: Mapping[str, Any], sources: Sources) -> bool:
    """Return whether the files that both know are the same, but for comments; a recipe is known by its place."""
    before, now = record["files"], facts["files"]
    if not before and not now:
        return bool(record["place"] == facts["place"])
    if "" not in before or "" not in now:
        return False
    for name, text in sources.files.items():
        key = "" if name == sources.script.file_name else name
        if key in before and before[key] != now[key] and record["code"][key] != _code_digest(text):
            return False
    return True


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return with which settings it was verified, as far as they are others now."""
    return [
        f"{name.removesuffix(' version')}{' ' if name.endswith(' version') else '='}{_written(value)}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def _written(value: object) -> str:
    text = plain(str(value).lower() if isinstance(value, bool) else str(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _records(file: Path) -> list[dict[str, Any]]:
    """Return the records that have the right form, the newest first."""
    try:
        records = read_json(file, _LARGEST_BYTES)
    except (OSError, ValueError):
        return []
    return [record for record in records if _is_record(record)] if isinstance(records, list) else []


def _is_record(record: Any) -> bool:
    try:
        return (
            all(isinstance(record[key], dict) for key in ("files", "code", "settings"))
            and record["files"].keys() == record["code"].keys()
            and all(isinstance(record[key], str) for key in ("place", "project"))
            and all(isinstance(world, int) for world in record["worlds"])
            and isinstance(record["time_s"], int | float)
        )
    except (TypeError, KeyError):
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_digest(text: str) -> str:
    """Return a digest of a text without its comments and its form."""
    try:
        return _digest(ast.dump(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _digest(text)


def _day(time_s: float) -> str:
    """Return a day, without the year if it is this one.

    >>> _day(0.0)
    '1 January 1970'
    """
    try:
        day = time.localtime(time_s)
    except (ValueError, OverflowError, OSError):
        return "an unknown day"
    year = "" if day.tm_year == time.localtime().tm_year else f" {day.tm_year}"
    return f"{day.tm_mday} {_MONTHS[day.tm_mon - 1]}{year}"
