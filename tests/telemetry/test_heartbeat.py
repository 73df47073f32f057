"""Does a rank say where it is, and does saying it never harm the training?"""

from __future__ import annotations

import errno
import itertools
import json
import stat
import threading
import time
from pathlib import Path

import pytest

from paceline.rundir import RunDir
from paceline.telemetry import heartbeat
from paceline.telemetry.heartbeat import Heartbeat
from paceline.world.world import World


def steps_of(heart: Heartbeat, count: int) -> None:
    for step in heart.reading(range(count)):
        heart.step_done(step + 1, time.perf_counter())


def wait_for_writer(heart: Heartbeat) -> None:
    """Wait until the last beat is written; the end of a training waits for it only for a moment."""
    heart._writer.thread.join(60)
    assert not heart._writer.thread.is_alive()


def beat_of(folder: RunDir, rank: int = 0) -> dict:
    return json.loads(folder.beat(rank).read_text())


def test_the_last_beat_says_where_the_rank_is_and_what_it_spent(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "runs" / "run")
    before = time.time()
    with Heartbeat(folder, World(rank=3, size=4)) as heart:
        for step in heart.reading(time.sleep(0.02) or step for step in range(5)):  # slow samples
            time.sleep(0.01)
            heart.step_done(step + 1, time.perf_counter())
            time.sleep(0.03)  # the others
    wait_for_writer(heart)
    beat = beat_of(folder, 3)
    assert (beat["rank"], beat["step"]) == (3, 5)
    assert before < beat["time_s"] < time.time()
    assert 0.02 <= beat["data_s"] < beat["own_s"]
    assert beat["own_s"] >= 0.03


def test_a_beat_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "runs" / "run")
    with Heartbeat(folder, World(), every_s=0.0) as heart:
        steps_of(heart, 50)
    wait_for_writer(heart)
    [beat] = folder.beat(0).parent.iterdir()
    assert stat.S_IMODE(beat.stat().st_mode) == 0o600
    assert stat.S_IMODE(beat.parent.stat().st_mode) == 0o700
    assert beat_of(folder)["step"] == 50


def test_a_reader_never_sees_half_a_beat(tmp_path: Path) -> None:
    folder, seen, limit = RunDir(tmp_path), set(), time.monotonic() + 60
    with Heartbeat(folder, World(), every_s=0.0) as heart:
        for step in heart.reading(itertools.count(1)):
            heart.step_done(step, time.perf_counter())
            time.sleep(0.001)
            if folder.beat(0).exists():
                seen.add(beat_of(folder)["step"])
            if step >= 300 and (len(seen) > 1 or time.monotonic() > limit):
                break
    assert len(seen) > 1


def test_beats_come_at_their_interval_and_more_seldom_in_a_large_world(tmp_path, monkeypatch):
    beats = []
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: beats.append(self._step))
    with Heartbeat(RunDir(tmp_path), World(), every_s=0.1) as heart:
        begun = heart._due - 0.1
        for step in heart.reading(range(1, 31)):
            heart.step_done(step, begun + 0.03 * step)
    assert beats == [4, 8, 12, 16, 20, 24, 28, 30]  # the last one is of the end
    with Heartbeat(RunDir(tmp_path), World(size=3200)) as heart:
        assert heart._every_s == 100.0


def test_a_run_without_a_step_says_nothing(tmp_path: Path) -> None:
    with Heartbeat(RunDir(tmp_path / "run"), World()):
        pass
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("in the way")
    with Heartbeat(RunDir(tmp_path), World(), every_s=0.0) as heart:
        steps_of(heart, 10)
    assert (tmp_path / "ranks").read_text() == "in the way"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_harms_nothing_and_is_tried_again(
    tmp_path, monkeypatch, error: int
) -> None:
    replace, failures = Path.replace, [error] * 3

    def failing(self: Path, target: Path) -> Path:
        if failures:
            raise OSError(failures.pop(), "no")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    folder = RunDir(tmp_path)
    limit = time.monotonic() + 60
    with Heartbeat(folder, World(), every_s=0.01) as heart:
        for step in heart.reading(itertools.count(1)):
            heart.step_done(step, time.perf_counter())
            time.sleep(0.01)
            if step >= 20 and (not failures or time.monotonic() > limit):
                break
    wait_for_writer(heart)
    assert not failures
    assert beat_of(folder)["step"] == step
    assert [path.name for path in folder.beat(0).parent.iterdir()] == ["0000.beat"]


def test_a_disk_that_hangs_holds_no_step_up(tmp_path, monkeypatch) -> None:
    begun, goes_on, written = threading.Event(), threading.Event(), []

    def hang(path: Path, partial: Path, beat: heartbeat.Beat) -> None:
        begun.set()
        written.append(goes_on.wait(60))

    monkeypatch.setattr(heartbeat, "write_beat", hang)
    with Heartbeat(RunDir(tmp_path), World(), every_s=0.0) as heart:
        for step in heart.reading(range(1, 101)):
            heart.step_done(step, time.perf_counter() + step)  # each is due
            assert begun.wait(60)
    assert written == []  # neither a step nor the end has waited for it
    goes_on.set()
    wait_for_writer(heart)
    assert written == [True, True]
