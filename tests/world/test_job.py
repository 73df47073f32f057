"""The end of a job is asked of Slurm, and not being told is no harm."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from paceline.world import job
from paceline.world.job import job_end


def put_squeue(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_time_left_makes_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_squeue(tmp_path, 'echo "$@" > words; echo 1:00:00', monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert abs(job_end({"SLURM_JOB_ID": "7"}) - time.time() - 3600) < 5
    assert "--jobs 7" in (tmp_path / "words").read_text()


NO_ANSWER = ["echo UNLIMITED", "echo NOT_SET", "echo", "echo 1:00; exit 1", "exec sleep 20"]


@pytest.mark.parametrize("body", NO_ANSWER)
def test_no_answer_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    put_squeue(tmp_path, body, monkeypatch)
    monkeypatch.setattr(job, "_ANSWERS_WITHIN_S", 0.3)
    assert job_end({"SLURM_JOB_ID": "7"}) == math.inf


def test_nobody_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for env in ({}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7; x"}):
        assert job_end(env) == math.inf
