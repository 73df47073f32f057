"""Only one process writes a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.errors import EnvironmentUnfit
from paceline.runlock import claimed
from support.program import started
from survive.conftest import SCRIPT, SHORT, pid


def test_a_run_that_is_being_written_is_refused_with_the_name_of_its_writer(tmp_path: Path) -> None:
    with claimed(tmp_path / "lock"):
        refused = pytest.raises(EnvironmentUnfit, match=f"process {os.getpid()} on ")
        with refused as caught, claimed(tmp_path / "lock", patience_s=0.2):
            raise AssertionError("two at once")
        assert "another name=" in caught.value.fix
    with claimed(tmp_path / "lock", patience_s=0.0):
        assert (tmp_path / "lock").stat().st_mode & 0o077 == 0


def test_a_second_launch_of_a_run_waits_then_says_who_holds_it(tmp_path: Path) -> None:
    with started("run", SCRIPT, *SHORT, "epochs=100000", folder=tmp_path) as first:
        holder = pid(tmp_path, "evaluate")
        second = paceline_beside("run", SCRIPT, *SHORT, folder=tmp_path)
        assert second.code == 3
        assert f"runs/training is being written by process {holder} on " in second.err
        first.process.send_signal(signal.SIGTERM)
        assert first.wait().code == 75


def paceline_beside(*words: str, folder: Path):
    with started(*words, folder=folder) as running:
        return running.wait()


def test_a_killed_writer_leaves_no_lock_behind(tmp_path: Path) -> None:
    with started(
        "run", SCRIPT, *SHORT, "epochs=100000", "checkpoint.every=1steps", folder=tmp_path
    ) as first:
        os.kill(pid(tmp_path, "evaluate"), signal.SIGKILL)
        first.process.kill()
    again = paceline_beside("run", SCRIPT, *SHORT, "checkpoint.every=5steps", folder=tmp_path)
    assert again.code == 0
    assert "resumed after step " in again.out
