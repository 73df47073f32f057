"""Does the watchdog distinguish a process that was stopped from a rank without progress?"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.hang import rank_report, watchdog
from paceline.hang.flight_recorder import Collective
from paceline.hang.rank_report import RankException, current_report, read_report, write_report
from paceline.hang.verdict import HangVerdict, write_verdict
from paceline.hang.watchdog import Deadline, Hang, Watchdog
from paceline.rundir import RunDir, make_private
from paceline.telemetry.pulse import Pulse
from paceline.world.world import World


@pytest.mark.parametrize(
    ("wait_s", "check_s", "signs"), [(0.5, 0.0, 0), (10.0, 0.0, 3), (0.5, 10.0, 0)]
)
def test_only_a_wait_that_took_too_long_says_that_the_process_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float, check_s: float, signs: int
) -> None:
    now_s, checks, pulse = 0.0, [], Pulse(3.0)

    def wait(_: float) -> bool:
        nonlocal now_s
        now_s += wait_s
        return len(checks) == 3

    def check() -> None:
        nonlocal now_s
        now_s += check_s
        checks.append(now_s)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s))
    dog = Watchdog(RunDir(tmp_path), World(), pulse, print, lambda _: None)
    monkeypatch.setattr(dog, "_over", SimpleNamespace(wait=wait))
    monkeypatch.setattr(dog, "_check", check)
    dog._watch()
    assert pulse.signs == signs


@pytest.mark.parametrize(("quiet_s", "state"), [(4.0, "moving"), (14.0, "stuck")])
def test_a_rank_in_a_slow_step_is_not_stuck_because_somebody_asks(
    tmp_path: Path, quiet_s: float, state: str
) -> None:
    pulse = Pulse(3.0)
    pulse._extra_s, pulse._times = 0.0, deque([4.0])
    pulse.since = time.monotonic() - quiet_s
    dog = Watchdog(RunDir(tmp_path), World(), pulse, print, lambda _: None)
    make_private(RunDir(tmp_path).alarm.parent)
    RunDir(tmp_path).alarm.touch()
    dog._check()
    assert read_report(RunDir(tmp_path).hang_record(0)).state == state


@pytest.mark.parametrize(
    ("since_s", "changed", "said"),
    [
        (3.0, {}, []),  # it is busy, and will write its report
        (15.0, {}, ["silent"]),
        (3.0, {"node": "elsewhere"}, ["silent"]),
        (3.0, {"state": "stuck"}, ["stuck"]),
    ],
    ids=["busy", "unresponsive", "elsewhere", "has reported"],
)
def test_a_rank_of_this_host_that_runs_is_given_longer_to_write_its_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    since_s: float,
    changed: dict[str, str],
    said: list[str],
) -> None:
    folder, pulse, found = RunDir(tmp_path), Pulse(3.0), []
    write_report(folder, current_report(World(rank=0, size=2), pulse, "stuck"))
    write_report(
        folder, replace(current_report(World(rank=1, size=2), pulse, "running"), **changed)
    )
    dog = Watchdog(folder, World(rank=0, size=2), pulse, print, lambda _: None)
    monkeypatch.setattr(
        watchdog, "time", SimpleNamespace(monotonic=lambda: since_s, time=time.time)
    )
    monkeypatch.setattr(dog, "_announce", lambda _, verdict: found.append(verdict.cause))
    dog._judge(Hang(signs=0, since_s=0.0))
    assert found == said


WAITING = Collective("0", 7, "all-reduce", ((3,),), ("Float",), done=False)


@pytest.mark.parametrize(
    ("quiet_s", "collectives", "awaited", "ends"),
    [
        (14.0, [WAITING], (), ""),
        (16.0, [WAITING], (), "another"),
        (60.0, [], (), ""),
        (14.0, [], (0,), ""),
        (16.0, [], (0,), "this"),
        (60.0, [], (2,), ""),
    ],
    ids=["not yet", "due", "computes", "not yet awaited", "awaited", "another is awaited"],
)
def test_a_rank_that_waits_in_native_code_is_ended_after_its_deadline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quiet_s: float,
    collectives: list[Collective],
    awaited: tuple[int, ...],
    ends: str,
) -> None:
    pulse, ended = Pulse(3.0), []
    pulse._extra_s, pulse._times = 0.0, deque([0.1])
    pulse.since = time.monotonic() - quiet_s
    make_private(RunDir(tmp_path).alarm.parent)
    monkeypatch.setattr(rank_report, "last_collectives", lambda: list(collectives))
    explain = lambda error: RankException(type(error).__name__, str(error), lost_peer=False)  # noqa: E731
    dog = Watchdog(RunDir(tmp_path), World(), pulse, print, explain, Deadline(15.0, ended.append))
    dog._begin_hang()
    dog._hang = Hang(pulse.signs, time.monotonic() - quiet_s, reported=True)
    if awaited:
        write_verdict(RunDir(tmp_path), HangVerdict("own code", awaited, (1,), "it computes"))
    dog._check()
    assert [str(error) for error in ended] == [
        f"Timed out waiting for {ends} rank: no step for 16 s (timeout.step_s=15)"
    ] * bool(ends)
    state = read_report(RunDir(tmp_path).hang_record(0)).state
    assert state == ("failed" if ends else "stuck")
