"""Does a job outlive its time limit, preemption, lost nodes and lost daemons, with the bits of one that was left alone?"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
from slurm.submitting import SCRIPT, Desk, digest

pytestmark = pytest.mark.slow

LONG = ("batch.global_size=16", "epochs=25", "checkpoint.every=end", "log.every_steps=1")
SLOW = {"SLOW_STEP": "0.04"}
TWO_NODES = ("training.py", "--nodes", "2", "--ranks-per-node", "1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run([sys.executable, SCRIPT, *LONG], cwd=folder, capture_output=True, text=True, check=True)
    return digest(done.stdout)


def steps_repeated(events: list[dict]) -> int:
    """Return how many steps were done in vain, at the most, by any start of the run."""
    repeated, last = [0], 0
    for event in events:
        if event["event"] == "RunStarted":
            repeated.append(last - event["from_step"])
        elif event["event"] == "StepDone":
            last = event["step"]
    return max(repeated)


def completed(desk: Desk, job: str, alone: str, starts: int, name: str = "training", timeout_s: float = 150) -> str:
    """See that a job has ended well, after so many starts at least."""
    facts = desk.cluster.wait(job, timeout_s=timeout_s)
    log = desk.log(name, job)
    assert facts["JobState"] == "COMPLETED", log
    assert digest(log) == alone
    begun = [event for event in desk.events(name) if event["event"] == "RunStarted"]
    assert len(begun) >= starts, log
    return log


@pytest.mark.slurm(nodes=2, cpus=2, gpus=0, cgroup=True)
def test_a_time_limit_shorter_than_the_training(slurm, alone: str) -> None:
    desk = Desk.on(slurm, "lead_s = 45")
    job = desk.submit(*TWO_NODES, "--time", "1", *LONG, env={"SLOW_STEP": "0.08"})
    log = completed(desk, job, alone, starts=2)
    assert "asking the ranks to save and leave" in log
    assert "back into the queue" in log
    assert steps_repeated(desk.events("training")) == 0
    assert (desk.folder / "runs" / "training" / "jobs" / "over").read_text() == "it is complete\n"


@pytest.mark.slurm(nodes=2, cpus=2, gpus=0)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_signal_to_the_steps_of_a_job(slurm, alone: str, launcher: str) -> None:
    desk = Desk.on(slurm)
    job = desk.submit(*TWO_NODES, "--time", "10", "--launcher", launcher, *LONG, env=SLOW)
    desk.await_line("training", job, "epoch 3/25")
    slurm.run(["scancel", "--signal=TERM", job])
    completed(desk, job, alone, starts=2)
    assert steps_repeated(desk.events("training")) == 0


@pytest.mark.slurm(nodes=2, cpus=2, gpus=0, cgroup=True, grace=20)
def test_preemption_by_a_job_that_matters_more(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    job = desk.submit(*TWO_NODES, "--time", "10", "--partition", "low", *LONG, env=SLOW)
    desk.await_line("training", job, "epoch 3/25")
    slurm.sbatch("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 3")
    completed(desk, job, alone, starts=2)
    assert steps_repeated(desk.events("training")) == 0


@pytest.mark.slurm(nodes=2, cpus=2, gpus=0, settings={"SlurmdTimeout": 10})
def test_a_rank_that_lives_on_where_slurm_cannot_see_it_is_fenced_off(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    words = ("training.py", "--ranks-per-node", "1", "--time", "10", *LONG, "checkpoint.every=5steps")
    job = desk.submit(*words, env={"SLOW_STEP": "0.1"})
    desk.await_line("training", job, "saved ")
    slurm.link("n1", "down")  # Slurm takes the node for dead and starts the job on n2; here the disk is still shared
    desk.await_line("training", job, "start 2, on n2", timeout_s=60)
    log = desk.await_line("training", job, "was taken over by process", timeout_s=30)
    assert "fix: nothing: that one goes on" in log
    completed(desk, job, alone, starts=2)


@pytest.mark.slurm(nodes=3, cpus=2, gpus=0, settings={"SlurmdTimeout": 10})
def test_a_node_whose_daemon_died(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    job = desk.submit(*TWO_NODES, "--time", "10", *LONG, "checkpoint.every=5steps", env={"SLOW_STEP": "0.1"})
    desk.await_line("training", job, "saved ")
    slurm.slurmd("n1", "kill")
    completed(desk, job, alone, starts=2)
    assert "start 2, on n[2-3]" in desk.log("training", job)


@pytest.mark.slurm(nodes=3, cpus=2, gpus=0)
def test_a_node_whose_rank_was_killed_is_left_out_from_then_on(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    job = desk.submit(*TWO_NODES, "--time", "10", *LONG, "checkpoint.every=5steps", env=SLOW)
    desk.await_line("training", job, "saved ", times=2)
    victim = slurm.run(["sh", "-c", "kill -9 $(pgrep -f [p]aceline.launch.task)"], node="n2")
    assert victim.code == 0, victim.err
    log = completed(desk, job, alone, starts=2)
    assert "leaving out n2" in log
    assert "start 2, on n[1,3]" in log


@pytest.mark.slurm(nodes=1, cpus=2, gpus=0)
def test_a_chain_of_jobs_where_requeueing_is_forbidden(slurm, alone: str) -> None:
    desk = Desk.on(slurm)
    words = ("training.py", "--ranks-per-node", "1", "--time", "10", "--jobs", "4", *LONG)
    first = desk.submit(*words, env=SLOW)
    chain = (desk.folder / "runs" / "training" / "jobs" / "chain").read_text().split()
    assert chain == [str(int(first) + place) for place in range(4)]
    desk.await_line("training", first, "epoch 3/25")
    slurm.run(["scancel", "--signal=USR1", first])
    completed(desk, chain[1], alone, starts=2)
    assert "the next job of the chain goes on" in desk.log("training", first)
    limit = time.monotonic() + 20
    while any(slurm.job(job)["JobState"] == "PENDING" for job in chain[2:]):
        assert time.monotonic() < limit
        time.sleep(0.2)
    assert [slurm.job(job)["JobState"] for job in chain[2:]] == ["CANCELLED", "CANCELLED"]


@pytest.mark.slurm(nodes=1, cpus=2, gpus=0)
def test_a_run_that_cannot_begin_is_not_tried_again(slurm) -> None:
    desk = Desk.on(slurm)
    job = desk.submit("training.py", "--ranks-per-node", "2", "--time", "10", "batch.lanes=1", "batch.global_size=8")
    assert slurm.wait(job, timeout_s=60)["JobState"] == "FAILED"
    log = desk.log("training", job)
    assert log.count("2 ranks cannot share 1 lanes") == 1  # not once for each rank
    assert "fix: set batch.lanes=2" in log
    assert "back into the queue" not in log


def test_repeated_steps_are_counted() -> None:
    done = [{"event": "StepDone", "step": step} for step in range(1, 6)]
    again = {"event": "RunStarted", "from_step": 3}
    assert steps_repeated([*done, again]) == 2
    assert steps_repeated(list(itertools.chain(done, [again | {"from_step": 5}]))) == 0
