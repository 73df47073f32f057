"""The verdict of the launcher on ranks that end between two polls, or while it stops them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline import handover
from paceline.launch import rank_local, supervisor
from paceline.launch.failure import RankEnd
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec, script

SAVES_WHEN_ENDED = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    Path(os.environ["PACELINE_PROGRESS"]).write_text("7")
    sys.exit(1)

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
    Path("ready").touch()
    time.sleep(600)
while not Path("ready").exists():
    time.sleep(0.01)
raise ValueError("no more data")
"""


def spec_of(folder: Path, text: str) -> LaunchSpec:
    (folder / "script.py").write_text(text)
    return LaunchSpec(script(str(folder / "script.py")), ranks=2)


def test_ranks_that_left_while_the_launcher_was_held_have_left_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_left = supervisor._time_left

    def held(ranks: list[supervisor.Rank], signals: StopSignals) -> float:
        """Request a stop, and poll again only when the time is over and all ranks have exited."""
        time_left(ranks, signals)
        for rank in ranks:
            os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
        return 0.0

    monkeypatch.setattr(supervisor, "_time_left", held)
    signals = StopSignals()
    signals.count, signals.first = 1, signal.SIGTERM
    failure = supervisor.launch(spec_of(tmp_path, "import time; time.sleep(600)"), signals=signals)
    assert (failure.exit_code, "saved no checkpoint" in failure.message) == (143, False)


def test_a_rank_that_ended_while_the_launcher_was_held_did_not_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_ends = supervisor._note_ends

    def one_is_late(ranks: list[supervisor.Rank]) -> bool:
        """Let rank 0 end after the last look at which rank 1 is seen to have ended."""
        os.waitid(os.P_PID, ranks[1].process.pid, os.WEXITED | os.WNOWAIT)
        found = note_ends(ranks[1:])
        (tmp_path / "noted").touch()
        os.waitid(os.P_PID, ranks[0].process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(supervisor, "_note_ends", note_ends)
        return found

    monkeypatch.setattr(supervisor, "_note_ends", one_is_late)
    monkeypatch.setattr(supervisor, "_GATHER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    text = "import os, time\nwhile os.environ['RANK'] == '0' and not os.path.exists('noted'): time.sleep(0.01)\nos._exit(3)"
    failure = supervisor.launch(spec_of(tmp_path, text))
    assert (failure.rank, failure.exit_code) == (1, 3)


def test_a_checkpoint_that_is_completed_while_ranks_are_ended_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure = supervisor.launch(spec_of(tmp_path, SAVES_WHEN_ENDED))
    assert (failure.rank, failure.progress) == (1, 7)
    assert "no more data" in failure.message


def test_a_report_is_there_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write, seen = tmp_path / "failure.json", Path.write_text, []

    def write_and_look(self: Path, text: str, **how: str) -> int:
        written = write(self, text, **how)
        seen.append(file.exists())
        return written

    monkeypatch.setenv(handover.FAILURE, str(file))
    monkeypatch.setattr(Path, "write_text", write_and_look)
    rank_local._report(ValueError("no more data"))
    assert seen == [False]
    assert list(tmp_path.iterdir()) == [file]
    assert RankEnd.read(0, 1, 1.0, file, ()).what == "ValueError"
