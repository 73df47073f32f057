"""Is a straggler found, with its phase, and as chronic or one-off?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.config.values import with_settings
from paceline.errors import Stopped
from paceline.rundir import RunDir, make_private
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.phases import PHASES, PhaseClock, PhaseTime
from paceline.telemetry.rank_times import read_samples
from paceline.telemetry.stragglers import (  # fmt: skip
    StragglerWatch,
    describe_straggler,
    find_straggler,
    read_beats,
)
from support.processes import run_on_processes

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "trials"
DELAYED = ("data", "forward", "backward", "optimizer", "gc")


def beat(rank: int, largest: dict[str, float] | None = None, **steady: float) -> Beat:
    phases = {}
    for phase in (*PHASES, "wait"):
        usual = steady.get(phase, 0.01)
        phases[phase] = PhaseTime(usual, usual, (largest or {}).get(phase, usual), 7)
    return Beat(rank, "n1", 99, 0.0, 0.06, 0.01, 0.02, 20, phases)


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_rank_is_named_with_its_phase_and_whether_it_was_slow_once(phase: str) -> None:
    for ranks in (2, 4):
        beats = [beat(rank, **({phase: 0.05} if rank == 1 else {})) for rank in range(ranks)]
        found = find_straggler(beats, ranks, ranks)
        assert (found.beat.rank, found.phase, found.kind) == (1, phase, "chronic")
        assert found.more_s == pytest.approx(0.04)
        assert "rank 1 (n1) is slow: +40.0 ms per step " in describe_straggler(found)
    beats = [beat(rank, {phase: 1.0} if rank == 2 else None) for rank in range(4)]
    found = find_straggler(beats, 4, 4)
    assert (found.beat.rank, found.phase, found.kind, found.step) == (2, phase, "one-off", 7)
    assert "rank 2 (n1) was slow once, in step 7: +990.0 ms " in describe_straggler(found)


@pytest.mark.parametrize(
    "beats",
    [
        [beat(0), beat(1)],
        [beat(0, data=0.012), beat(1)],
        [beat(0, {"other": 1.0}), beat(1, {"other": 1.05})],  # all evaluate
        [beat(0, {"gc": 0.09}), beat(1)],
        [beat(0, data=0.05, wait=1.0), beat(1, wait=1.04)],
    ],
    ids=["even", "by chance", "a pause of all", "a short one", "all wait for messages anyway"],
)
def test_nobody_is_named_where_nobody_holds_the_others_up(beats: list[Beat]) -> None:
    assert find_straggler(beats, 2, 2) is None


def test_there_is_news_when_two_looks_agree_and_when_it_is_over(tmp_path: Path) -> None:
    folder = make_private(tmp_path / "ranks")
    watch = StragglerWatch(folder, 2, 2, since_s=0.0)

    def look(*beats: Beat):
        for one in beats:
            (folder / f"{one.rank}.beat").write_text(json.dumps(asdict(one)))
        watch.look()
        return watch.news()

    slow = beat(1, data=0.1)
    assert look(beat(0), slow) is None
    found, before = look(beat(0), replace(slow, step=100))
    assert (found.beat.rank, found.phase, before) == (1, "data", None)
    assert look(beat(0), slow) is None
    assert look(beat(0), beat(1)) is None
    assert look(beat(0), beat(1)) == (None, found)


def test_a_damaged_beat_says_nothing(tmp_path: Path) -> None:
    no_rank = '{"rank": "x", "node": 1, "step": 1, "time_s": 1}'
    for number, text in enumerate(("{", "3", '{"rank": 0}', no_rank)):
        (tmp_path / f"000{number}.beat").write_text(text)
    assert read_beats(tmp_path, 4, 0.0) == []


def test_a_collection_is_taken_out_of_the_phase_that_it_interrupts() -> None:
    clock = PhaseClock()
    clock.begin_step()
    clock.enter("forward")
    clock._on_gc("start", {})
    started = clock._gc_since
    clock._gc_since = started - 100.0  # as if it had taken so long
    clock._since -= 100.0
    clock._on_gc("stop", {})
    spent = clock.take(started, started, started)
    assert spent["gc"] >= 100.0
    assert spent["forward"] < 100.0


def count_no_pauses(slow_training) -> None:
    """Let the clock of this process count what it computes and what it sleeps on purpose, but no pause of the machine."""
    slept_s, sleep = 0.0, time.sleep

    def sleep_on_purpose(seconds: float) -> None:
        nonlocal slept_s
        sleep(seconds)
        slept_s += seconds

    slow_training.time = SimpleNamespace(sleep=sleep_on_purpose)
    time.perf_counter = lambda: time.process_time() + slept_s


def train(words: dict) -> None:
    sys.path.insert(0, str(SCRIPTS))
    import slow_training

    count_no_pauses(slow_training)
    common = {"steps": 16, "log.progress": "lines"}
    slow_training.main(with_settings(slow_training.TrainingConfig(), {**common, **words}))


def slow(phase: str, rank: int, seconds: float) -> dict:
    return {"slow.phase": phase, "slow.rank": rank, "slow.seconds": seconds}


def until_it_is_told() -> None:
    sys.path.insert(0, str(SCRIPTS))
    import slow_training

    def stop_when_told() -> None:
        events = Path("runs/slow/events.jsonl")
        while not (events.exists() and '"SlowRank"' in events.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "0":
        threading.Thread(target=stop_when_told, daemon=True).start()
    words = {"steps": 900, "log.progress": "lines"} | slow("optimizer", 1, 0.1)
    with contextlib.suppress(Stopped):
        slow_training.main(with_settings(slow_training.TrainingConfig(), words))


def test_a_run_says_which_rank_holds_it_up(tmp_path: Path) -> None:
    run_on_processes(until_it_is_told, 2, tmp_path, {})
    [events] = tmp_path.glob("meeting-*/runs/slow/events.jsonl")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    told = [event for event in found if event["event"] == "SlowRank"]
    assert (told[0]["rank"], told[0]["phase"], told[0]["kind"]) == (1, "optimizer", "chronic")
    assert told[0]["sentence"].startswith("rank 1 (")
    looks = read_samples(RunDir(events.parent).rank_times)
    assert looks
    assert all(look.own_s[1] > look.own_s[0] for look in looks if None not in look.own_s)


heavy = pytest.mark.heavy


@pytest.mark.parametrize(
    ("exact", "phases"),
    [
        pytest.param(True, DELAYED, marks=heavy),
        pytest.param(False, ("backward",), marks=heavy),
        (True, ("data",)),
    ],
    ids=["exact", "free", "one phase"],
)
def test_ranks_that_are_made_slow_are_named_with_the_phase(tmp_path: Path, exact, phases) -> None:
    delays = {phase: slow(phase, number % 3, 0.02) for number, phase in enumerate(phases)}
    delays["once"] = slow("backward", 2, 1.0) | {"slow.step": 9}
    named = {}
    for name, words in delays.items():
        run_on_processes(train, 3, tmp_path, {}, {"words": {**words, "name": name, "exact": exact}})
        [ranks] = tmp_path.glob(f"meeting-*/runs/{name}/ranks")
        found = find_straggler(read_beats(ranks, 3, 0.0), 6, 3)
        named[name] = found and (found.beat.rank, found.phase, found.kind)
    wanted = {phase: (number % 3, phase, "chronic") for number, phase in enumerate(phases)}
    assert named == wanted | {"once": (2, "backward", "one-off")}
