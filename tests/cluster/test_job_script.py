"""The batch shell judges how its step ended. Slurm's commands are stubs that print what a case needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline.cluster

TAIL = Path(paceline.cluster.__file__).with_name("job.sh")
SLURM = {
    "squeue": 'case "$*" in *RestartCnt*) echo RUNNING 0 ;; *) echo N/A ;; esac',
    "scancel": ":",
    "sinfo": ":",
    "scontrol": 'echo "scontrol $*"',
}
TOLD_AND_DEAD = 'kill -USR1 "$SHELL_OF_JOB"; kill -USR1 $$'
SAYS_WHY = 'touch "$PACELINE_STOPPED.0123abcd"; '


NOT_LAUNCHED = """
echo "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure" >&2
echo "srun: error: Application launch failed: Communication connection failure" >&2
echo "srun: error: n1: task 0: Killed" >&2
exit 233
"""
WITHOUT_FOLDER = """
echo "rank 1 (n2): error: /x is not on node n2" >>"$(dirname "$PACELINE_STOPPED")/7.log"
touch "$PACELINE_STOPPED"
echo "srun: error: n2: task 1: Exited with exit code 3" >&2
echo "srun: error: n1: task 0: Exited with exit code 75" >&2
exit 75
"""


def job(folder: Path, step: str, foreign: str = "", **programs: str) -> tuple[int, str]:
    """Run a job's shell around a step; return its exit code and its output."""
    for name, text in (SLURM | programs).items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "run" / "jobs").mkdir(parents=True)
    (folder / "step").write_text(step)
    head = f"run={folder}/run\nrequeue=yes\nforeign={foreign}\nsurroundings() {{ export SHELL_OF_JOB=$$; }}\ncommand=(sh {folder}/step)\npage=()\n"
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
    }
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(
        ["bash", "-c", head + TAIL.read_text()], env=env, stdout=pipe, stderr=both, text=True
    )
    assert not list((folder / "run" / "jobs").glob("*.code"))
    return done.returncode, done.stdout


@pytest.mark.parametrize("slow", ["tee", "grep"])
def test_the_last_words_of_srun_are_waited_for(tmp_path: Path, slow: str) -> None:
    step = 'echo new >"$PACELINE_PROGRESS"; echo "srun: error: n1: task 0: Killed" >&2; kill -9 $$'
    code, said = job(tmp_path, step, **{slow: f'sleep 1; exec {shutil.which(slow)} "$@"'})
    assert (code, "failed with exit code 137; requeued" in said) == (0, True), said
    assert "srun: error: n1: task 0: Killed\n" in said
    assert (tmp_path / "run" / "jobs" / "failed-nodes").read_text() == "n1\n"


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        ("", "asked to stop before the training had started"),
        ("yes", "the script resumes by its own checkpoints, if it saves any"),
    ],
)
def test_a_step_that_dies_of_the_request_to_stop_is_started_again(
    tmp_path: Path, foreign: str, reason: str
) -> None:
    code, said = job(tmp_path, TOLD_AND_DEAD, foreign)
    assert (code, f"{reason}; requeued" in said) == (0, True), said
    assert "scontrol requeue 7" in said


@pytest.mark.parametrize(
    "step", ["kill -TERM $$", SAYS_WHY + TOLD_AND_DEAD], ids=["untold", "failed before"]
)
def test_a_step_that_dies_otherwise_has_failed(tmp_path: Path, step: str) -> None:
    code, said = job(tmp_path, step)
    assert (code, "; requeued" in said) in [(143, False), (138, False)], said
    assert (tmp_path / "run" / "jobs" / "over").read_text().startswith("failed with exit code")


def test_a_step_that_slurm_could_not_launch_is_started_again_elsewhere(tmp_path: Path) -> None:
    code, said = job(tmp_path, NOT_LAUNCHED)
    assert code == 0, said
    assert "Slurm could not start the ranks (Task launch for StepId=7.0 failed on node n2" in said
    assert "scontrol requeue 7" in said
    assert (tmp_path / "run" / "jobs" / "failed-nodes").read_text() == "n2\n"


def test_a_node_without_the_folder_of_the_run_is_a_failure_and_not_a_stop(tmp_path: Path) -> None:
    code, said = job(tmp_path, WITHOUT_FOLDER)
    assert (code, "requeue" in said) == (3, False), said
    verdict = (tmp_path / "run" / "jobs" / "over").read_text()
    assert verdict.startswith(
        "failed with exit code 3, rank 1 (n2): error: /x is not on node n2: see"
    )
