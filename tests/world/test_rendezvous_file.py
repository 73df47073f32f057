"""What rank 0 publishes is found by the others, by nobody else, and is gone afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.world.rendezvous import wait_for_address
from paceline.world.rendezvous_file import RendezvousFile


def test_an_address_is_found_as_soon_as_it_is_there(tmp_path: Path, monkeypatch) -> None:
    published = RendezvousFile(tmp_path / "runs" / "x" / "meetings", "slurm-7-0-0")
    published.prepare()
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            published.publish("10.0.0.1", 1234)

    monkeypatch.setattr(time, "sleep", pause)
    assert wait_for_address(published, 60) == ("10.0.0.1", 1234)
    assert len(pauses) == 3
    assert sum(pauses) < 1
    file = published.folder / "slurm-7-0-0"
    assert (file.stat().st_mode & 0o777, published.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    published.remove()
    published.remove()
    assert list(published.folder.iterdir()) == []


def test_jobs_steps_and_restarts_never_mix(tmp_path: Path) -> None:
    keys = ["slurm-7-0-0", "slurm-7-1-0", "slurm-8-0-0", "slurm-7-0-1"]
    files = [RendezvousFile(tmp_path / "meetings", key) for key in keys]
    for port, published in enumerate(files[:3], 1):
        published.prepare()
        published.publish("::1", port)
    assert [published.read() for published in files] == [("::1", 1), ("::1", 2), ("::1", 3), None]
    files[3].publish("::1", 4)  # what an earlier start of the job has left is swept away
    assert [published.read() for published in files] == [None, None, ("::1", 3), ("::1", 4)]


def test_old_files_are_removed(tmp_path: Path) -> None:
    old, new = (
        RendezvousFile(tmp_path / "meetings", key) for key in ("slurm-1-0-0", "slurm-2-0-0")
    )
    old.prepare()
    old.publish("::1", 1)
    os.utime(old.folder / old.key, (0, 0))
    new.publish("::1", 2)
    assert (old.read(), new.read()) == (None, ("::1", 2))


def test_a_problem_of_one_is_raised_by_all(tmp_path: Path) -> None:
    published = RendezvousFile(tmp_path / "meetings", "slurm-7-0-0")
    published.prepare()
    published.publish_error(ConfigError("no", fix="yes"))
    with pytest.raises(ConfigError, match="no\n  fix: yes"):
        wait_for_address(published, 10)


def test_a_timeout_names_the_folder_and_the_fix(tmp_path: Path) -> None:
    published = RendezvousFile(tmp_path / "meetings", "slurm-7-0-0")
    published.prepare()
    with pytest.raises(EnvironmentUnfit, match="0.1 s(.|\n)*meetings\n.*runs=.*MASTER_ADDR"):
        wait_for_address(published, 0.1)


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    published = RendezvousFile(tmp_path / "meetings", "slurm-7-0-0")
    published.prepare()
    published.folder.chmod(0o770)
    with pytest.raises(EnvironmentUnfit, match="chmod 700"):
        published.prepare()


@pytest.mark.parametrize("content", ["", "10.0.0.1", "10.0.0.1 x", "a b c"])
def test_half_a_file_is_ignored(tmp_path: Path, content: str) -> None:
    published = RendezvousFile(tmp_path, "slurm-7-0-0")
    (tmp_path / published.key).write_text(content)
    assert published.read() is None
