"""Is what each rank took kept over time, in a file that stays small, whatever happens to it?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.rank_times import RankTimes, read_samples


def beats(step: int, *own_s: float) -> list[Beat]:
    return [Beat(rank, "n", step, 0.0, seconds, 0.0, steps=9) for rank, seconds in enumerate(own_s)]


def test_a_long_run_keeps_a_small_file_that_shows_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "times.jsonl"
    kept = RankTimes(path, 2)
    for step in range(1, 3001):
        kept.add(beats(step, 0.1, 0.2 if step > 1500 else 0.1))
    looks = read_samples(path)
    assert 200 < len(looks) <= 480
    assert looks[0].step < 100
    assert looks[-1].step == 3000
    assert {look.own_s for look in looks if abs(look.step - 1500) > 30} == {(0.1, 0.1), (0.1, 0.2)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_lost_and_done_again_is_there_once_also_in_a_smaller_world(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    for kept, steps in ((RankTimes(path, 3), (10, 20, 30)), (RankTimes(path, 2), (20, 25))):
        for step in steps:
            kept.add(beats(step, 0.1, 0.1))
    looks = [(look.step, len(look.own_s)) for look in read_samples(path)]
    assert looks == [(10, 3), (20, 2), (25, 2)]
    with path.open("a") as file:
        file.write('{"step": 99, "own_')
    assert len(read_samples(path)) == 3


def test_a_look_without_news_and_a_disk_that_fails_harm_nothing(tmp_path: Path) -> None:
    kept = RankTimes(tmp_path / "times.jsonl", 2)
    kept.add([])
    kept.add([Beat(0, "n", 5, 0.0, 0.1, 0.0)])  # too early to say anything
    assert not (tmp_path / "times.jsonl").exists()
    kept.add(beats(6, 0.1, 0.1))
    kept.add(beats(6, 0.1, 0.1))
    assert len(read_samples(tmp_path / "times.jsonl")) == 1
    (tmp_path / "in the way").write_text("")
    RankTimes(tmp_path / "in the way" / "times.jsonl", 2).add(beats(7, 0.1, 0.1))
    assert sorted(os.listdir(tmp_path)) == ["in the way", "times.jsonl"]
