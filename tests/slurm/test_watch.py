"""Are the jobs of a real Slurm shown as they are, as one run through requeues and chains, and ended as they should be?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.registry import register
from paceline.events import EventLog, RunStopped
from support import run_folders as runs
from support.program import Done
from support.slurm_cluster.commands import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
]  # tests/report and tests/cli ask a squeue of their own
PACELINE = (sys.executable, "-m", "paceline")

# What a submitted job does at its end: saved and left in time, it asks to be requeued, unless it was cancelled.
SAVES_AND_LEAVES = """#!/bin/bash
leave() { echo saved > "$RUN/saved"; [ -e "$RUN/jobs/cancelled" ] || scontrol requeue "$SLURM_JOB_ID"; exit 0; }
trap leave TERM
echo "line of $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}"
sleep 100 & wait
"""


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; a Slurm that does not answer in time is asked again."""
    wait_until("what the test waits for", condition, timeout_s=240)


class Person:
    """Somebody who submits and looks, with a registry of their own."""

    def __init__(self, slurm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "runs" / "digits"
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setenv("COLUMNS", "200")
        runs.make_run(self.run)
        (self.run / "jobs").mkdir()

    def submit(self, *options: str, script: str = SAVES_AND_LEAVES) -> str:
        (self.folder / "job.sh").write_text(script)
        log = self.run / "jobs" / "%j.log"
        words = ["--requeue", f"--job-name={self.run.name}", "--open-mode=append", *options]
        where = [f"--output={log}", f"--export=ALL,RUN={self.run}", str(self.folder / "job.sh")]
        job = self.slurm.sbatch(*words, *where, folder=self.folder)
        register(runs.submission(job, self.run))
        return job

    def paceline(self, *words: str) -> Done:
        done = self.slurm.run([*PACELINE, *words], folder=self.folder)
        assert (done.code, done.err) == (0, ""), done
        return done

    def state(self, word: str = "digits") -> dict[str, Any]:
        return json.loads(self.paceline("watch", word, "--json").out)

    def events(self, *events: Any) -> None:
        with EventLog(self.run / "events.jsonl") as log:
            for event in events:
                log(event)

    def is_in(self, job: str, state: str) -> bool:
        return self.slurm.job(job)["JobState"] == state

    def is_forgotten(self, job: str) -> bool:
        """Return whether Slurm answers, and knows no such job."""
        asked = self.slurm.run(["squeue", "--noheader", "--states=all", "--format=%i"])
        return asked.code == 0 and job not in asked.out.split()


@pytest.fixture
def person(slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    return Person(slurm, tmp_path, monkeypatch)


@pytest.mark.slurm(nodes=1, cpus=2, settings={"SchedulerParameters": "bf_interval=1"})
def test_a_job_that_waits_says_why_and_for_how_long(person: Person) -> None:
    other = person.slurm.sbatch("--exclusive", "--time=30", "--wrap", "sleep 100")
    wait_for(lambda: person.is_in(other, "RUNNING"))
    job = person.submit("--exclusive", "--time=20")
    wait_for(lambda: person.state()["jobs"][0]["starts"] != "")
    out = person.paceline("watch", job).out
    assert "state  waiting in the queue\n" in out
    assert f"job    {job}  PENDING: Resources; expected to start 20" in out
    assert "requests 1 node for 20:00" in out
    assert f"digits  {job}     PENDING (Resources)  -     -" in person.paceline("jobs").out
    assert "was queued and will not start" in person.paceline("cancel", "digits").out
    assert person.slurm.wait(job)["JobState"] == "CANCELLED"
    assert "cancelled" in person.paceline("jobs").out
    # Slurm counts anew: the number of an old run's job is that of another job now.
    old = runs.make_run(person.folder / "runs" / "old", runs.started(time_s=time.time() - 7200))
    register(runs.submission(other, old.root, time_s=time.time() - 7200))
    assert f"job    {other}  has left the queue" in person.paceline("watch", "old").out
    assert "nothing to cancel" in person.paceline("cancel", other).out
    assert person.is_in(other, "RUNNING")


@pytest.mark.slurm(nodes=2, cpus=2)
def test_a_chain_that_is_requeued_is_one_run_and_ends_as_one(person: Person) -> None:
    first = person.submit("--time=10")
    second = person.submit("--time=10", f"--dependency=afterany:{first}")
    log = person.run / "jobs" / f"{first}.log"
    wait_for(lambda: log.exists() and "start 0" in log.read_text())
    assert person.state()["phase"] == "starting"
    person.events(runs.started(), *runs.trained(1, 101), RunStopped(101, "SIGTERM"))
    person.slurm.run(["scancel", "--batch", "--signal=TERM", first])
    wait_for(lambda: "start 1" in log.read_text())
    person.events(runs.started(101), *runs.trained(111, 151))
    found = person.state(second)
    assert [(job["job"], job["state"], job["requeues"]) for job in found["jobs"]] == [(first, "RUNNING", 1), (second, "PENDING", 0)]  # fmt: skip
    assert (found["phase"], found["step"], found["restarts"], found["jobs"][1]["reason"]) == ("training", 151, 1, "Dependency")  # fmt: skip
    out = person.paceline("watch", "digits").out
    assert "state  training; started 2 times\n" in out
    assert f"job    {first}  RUNNING on n1; 0:" in out
    assert "requeued 1 time\n" in out
    assert f"job    {second}  PENDING: Dependency; requests 1 node for 10:00\n" in out
    assert f"  line of {first}, start 0\n" in out
    assert out.endswith(f"  line of {first}, start 1\n")
    _, line = person.paceline("jobs").out.splitlines()
    assert f"digits  {first},{second}   RUNNING, 1 more waiting  151/1,000" in line
    (person.run / "saved").unlink()
    out = person.paceline("cancel", first).out
    assert out.startswith(f"job {second} was queued")
    assert f"job {first} was asked to save" in out
    states = [person.slurm.wait(job)["JobState"] for job in (second, first)]
    assert states == ["CANCELLED"] * 2
    assert (person.run / "saved").exists()  # it had its time
    assert "start 2" not in log.read_text()
    assert "nothing to cancel" in person.paceline("cancel", first).out


@pytest.mark.slurm(nodes=1, settings={"MinJobAge": 2})
def test_a_job_that_slurm_has_forgotten_is_as_its_events_tell(person: Person) -> None:
    job = person.submit(script="#!/bin/sh\necho done\n")
    person.events(runs.started(), *runs.trained(1, 101), RunStopped(101, "SIGTERM"))
    wait_for(lambda: person.is_forgotten(job))
    found = person.state(job)
    known = found["jobs"][0]["state"], found["phase"], found["log_tail"]
    assert known == ("GONE", "stopped", ["done"])
    assert f"job    {job}  has left the queue" in person.paceline("watch", job).out
    assert "  stopped  101/1,000" in person.paceline("jobs").out
    person.slurm.run(["sh", "-c", "kill -9 $(cat /run/slurmctld.pid)"])
    listed = person.slurm.run([*PACELINE, "jobs"], folder=person.folder)
    assert (listed.code, "Slurm does not answer" in listed.err) == (0, True), listed
    assert "  stopped (by its files)  101/1,000" in listed.out
