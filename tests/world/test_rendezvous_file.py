"""What rank 0 publishes is found by the others, by nobody else, and is gone afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.world.rendezvous import await_notice
from paceline.world.rendezvous_file import Notice


def test_an_address_is_found_as_soon_as_it_is_there(tmp_path: Path, monkeypatch) -> None:
    notice = Notice(tmp_path / "runs" / "x" / "meetings", "slurm-7-0-0")
    notice.prepare()
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            notice.publish("10.0.0.1", 1234)

    monkeypatch.setattr(time, "sleep", pause)
    assert await_notice(notice, 60) == ("10.0.0.1", 1234)
    assert len(pauses) == 3
    assert sum(pauses) < 1
    file = notice.folder / "slurm-7-0-0"
    assert (file.stat().st_mode & 0o777, notice.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    notice.withdraw()
    notice.withdraw()
    assert list(notice.folder.iterdir()) == []


def test_jobs_steps_and_restarts_never_mix(tmp_path: Path) -> None:
    keys = ["slurm-7-0-0", "slurm-7-1-0", "slurm-8-0-0", "slurm-7-0-1"]
    notices = [Notice(tmp_path / "meetings", key) for key in keys]
    for port, notice in enumerate(notices[:3], 1):
        notice.prepare()
        notice.publish("::1", port)
    assert [notice.read() for notice in notices] == [("::1", 1), ("::1", 2), ("::1", 3), None]
    notices[3].publish("::1", 4)  # what an earlier start of the job has left is swept away
    assert [notice.read() for notice in notices] == [None, None, ("::1", 3), ("::1", 4)]


def test_what_is_old_is_swept_away(tmp_path: Path) -> None:
    old, new = (Notice(tmp_path / "meetings", key) for key in ("slurm-1-0-0", "slurm-2-0-0"))
    old.prepare()
    old.publish("::1", 1)
    os.utime(old.folder / old.key, (0, 0))
    new.publish("::1", 2)
    assert (old.read(), new.read()) == (None, ("::1", 2))


def test_a_problem_of_one_is_raised_by_all(tmp_path: Path) -> None:
    notice = Notice(tmp_path / "meetings", "slurm-7-0-0")
    notice.prepare()
    notice.complain(ConfigError("no", fix="yes"))
    with pytest.raises(ConfigError, match="no\n  fix: yes"):
        await_notice(notice, 10)


def test_who_waits_in_vain_is_told_where_and_what_to_do(tmp_path: Path) -> None:
    notice = Notice(tmp_path / "meetings", "slurm-7-0-0")
    notice.prepare()
    with pytest.raises(
        EnvironmentUnfit,
        match="within 0.1 s(.|\n)*meetings\n.*file system that all nodes share.*MASTER_ADDR",
    ):
        await_notice(notice, 0.1)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    notice = Notice(tmp_path / "meetings", "slurm-7-0-0")
    notice.prepare()
    notice.folder.chmod(0o770)
    with pytest.raises(EnvironmentUnfit, match="chmod 700"):
        notice.prepare()


@pytest.mark.parametrize("content", ["", "10.0.0.1", "10.0.0.1 x", "a b c"])
def test_half_a_file_is_none(tmp_path: Path, content: str) -> None:
    notice = Notice(tmp_path, "slurm-7-0-0")
    (tmp_path / notice.key).write_text(content)
    assert notice.read() is None
