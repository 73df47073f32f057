"""Is the history that is read piece by piece the one that survives, and is looking again cheap?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    RunEnded,
    RunFailed,
    RunStarted,
    StepDone,
    as_json,
    surviving,
)
from paceline.report import history as module
from paceline.report.history import History, Metrics, parse_event
from paceline.report.page.event_columns import read_event_columns


def start(from_step: int = 0) -> RunStarted:
    return RunStarted(2, "cpu", "paceline", 1000, 32, 4, 0.1, 500, "two\nlines", from_step)


def step(number: int, loss: float = 0.5) -> StepDone:
    return StepDone(number, 1, number * 32, loss, 0.1, 1000.0)


@st.composite
def histories(draw: Any) -> list[list[str]]:
    """Several starts, each from some step on, some lines torn; cut into pieces anywhere between lines."""
    lines, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, at))
        lines.append(as_json(start(at)))
        for _ in range(draw(st.integers(0, 8))):
            at += 1
            events = [step(at, float(at)), CheckpointSaved(at, "x", at)]
            events += [EpochDone(1, 2, at, 0.25, 9.0, {}), Evaluated(at, {"acc": float(at)})]
            line = as_json(draw(st.sampled_from(events)))
            lines.append(line[: draw(st.integers(1, 40))] if draw(st.integers(0, 9)) == 0 else line)
    cuts = sorted(draw(st.lists(st.integers(0, len(lines)), max_size=3)))
    return [lines[low:high] for low, high in zip([0, *cuts], [*cuts, len(lines)], strict=True)]


@settings(max_examples=150)
@given(histories())
def test_what_is_read_in_pieces_is_what_survives(pieces: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        history = History(path)
        for piece in pieces:
            with path.open("a") as file:
                file.writelines(f"{line}\n" for line in piece)
            history.read()
        kept = surviving(path)
    steps = [event for event in kept if event["event"] == "StepDone"]
    saves = [event for event in kept if event["event"] == "CheckpointSaved"]
    figures = [event for event in kept if event["event"] in {"StepDone", "EpochDone"}]
    assert history.starts == sum(event["event"] == "RunStarted" for event in kept)
    evaluated = [event["step"] for event in kept if event["event"] == "Evaluated"]
    assert history.evaluation == ((evaluated[-1], {"acc": evaluated[-1]}) if evaluated else (0, {}))
    assert history.checkpoint == (saves[-1] if saves else None)
    if len(steps) > 1:
        assert history.losses(100)[-1] == steps[-1]["loss"]
    newest = max((event["step"] for event in figures), default=None)
    assert (history.latest.step if history.latest else None) == newest


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path, line = tmp_path / "events.jsonl", as_json(step(7))
    path.write_text(as_json(start()) + "\n" + line[:30])
    history = History(path)
    history.read()
    assert history.latest is None
    with path.open("a") as file:
        file.write(line[30:] + "\n")
    history.read()
    assert history.latest == Metrics(7, 0.5, 1000.0)


def test_a_file_that_is_another_one_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    history = History(path)
    history.read()
    assert (history.started, history.latest, history.losses(9)) == (None, None, [])
    path.write_text("\n".join(map(as_json, [start(), *map(step, range(1, 9))])) + "\n")
    history.read()
    path.unlink()
    path.write_text(as_json(start()) + "\n")
    history.read()
    assert (history.starts, history.latest) == (1, None)


def test_a_new_start_takes_the_ending_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    history = History(path)
    failed, ended = [start(), RunFailed(1, 0, "x")], [RunEnded(9, 1.0, "d")]
    for events, kind in ((failed, "RunFailed"), ([start()], None), (ended, "RunEnded")):
        with path.open("a") as file:
            file.writelines(f"{as_json(event)}\n" for event in events)
        history.read()
        assert (history.ending or {}).get("event") == kind


def test_looking_again_at_a_hundred_thousand_events_is_cheap(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        file.write(as_json(start()) + "\n")
        file.writelines(f"{as_json(step(number, 1 / number))}\n" for number in range(1, 100_001))
    history = History(path)
    seen = []
    monkeypatch.setattr(module, "parse_event", lambda line: seen.append(1) or parse_event(line))
    for _ in range(20):
        history.read()
        assert history.latest == Metrics(100_000, 1e-05, 1000.0)
        losses = history.losses(400)
    assert len(seen) < 20 * 500  # a look takes apart what it shows, not the whole file
    assert len(losses) == 400
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 1e-05


def test_an_event_log_beyond_its_limit_is_read_by_nobody(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with log.open("wb") as file:
        file.truncate(1 << 40)
    history = History(log)
    history.read()
    assert history.started is None
    assert "events.jsonl: it has 1,099,511,627,776 bytes" in history.problem
    assert read_event_columns(log).starts == []
    with pytest.raises(OSError, match="the limit is"):
        surviving(log)
