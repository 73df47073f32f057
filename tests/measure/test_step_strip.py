"""Does the picture of one step show who computed, who exchanged and who waited?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.measure.step_strip import strip_of
from paceline.measure.trace import RankTrace
from paceline.report.page.step_strip import step_strip, strip_from


def trace(rank: int, slow_ms: float) -> RankTrace:
    """Three steps of 100 ms, the second of 120; in each, this rank computes for some time, then waits, then all exchange."""
    phases, at = [], 0.0
    for number in range(3):
        length = 120.0 if number == 1 else 100.0
        done = at + 10 + slow_ms
        phases += [("data", at, at + 10), ("forward", at + 10, done), ("wait", done, at + 90)]
        phases.append(("optimizer", at + 90, at + length))
        at += length
    scaled = [(name, begin * 1000, end * 1000) for name, begin, end in phases]
    return RankTrace(rank, {}, [], scaled, 0.0, at * 1000)


def test_the_wait_for_a_slower_rank_is_parted_from_the_exchange() -> None:
    strip = strip_of([trace(0, 30.0), trace(1, 60.0)])
    assert strip["step_s"] == pytest.approx(0.1)
    fast, slow = strip["ranks"]
    assert fast["forward"] == [(0.01, 0.04)]
    assert fast["waiting"] == [(0.04, 0.07)]
    assert slow["waiting"] == []
    assert fast["exchange"] == slow["exchange"] == [(0.07, 0.09)]
    assert slow["optimizer"] == [(0.09, 0.1)]


def test_it_is_drawn_as_it_was_written_and_damage_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(strip_of([trace(0, 30.0), trace(1, 60.0)])))
    run = {"name": "x", "profile_step": strip_from(path)}
    drawn = step_strip(run)
    assert 'class="span p4" d="M700.00 30.0H900.00v440.0' in drawn  # the exchange of rank 0
    assert drawn.count("rank 1") == 1
    for content in ("[", "{}", '{"step_s": 1, "ranks": [7]}', '{"step_s": -1, "ranks": []}'):
        path.write_text(content)
        assert strip_from(path) is None
    path.write_text(
        '{"step_s": 1, "ranks": [{"forward": [[0, 2], ["x", 1], [0.5, 0.25], [0, 0.5]]}]}'
    )
    assert strip_from(path)["ranks"][0]["forward"] == [[0, 0.5]]


def test_a_window_without_a_step_has_no_picture() -> None:
    assert strip_of([RankTrace(0, {}, [], [("other", 0.0, 1.0)], 0.0, 1.0)]) is None
