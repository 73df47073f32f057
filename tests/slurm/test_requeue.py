"""Does a job outlive its time limit, preemption, lost nodes and lost daemons, with the bits of one that was left alone?

Each scenario is a job of its own. They all run at the same time on one cluster, for most of their time is waiting. One
of them, a job on two nodes that meets its time limit, is the test of Slurm in `make test`; the others are heavy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from paceline.world.hostlist import expand_hostlist
from support.private_cluster import cluster_or_skip, wanted
from support.program import around
from support.submitting import SCRIPT, Desk, digest

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

# Slurm looks every 30 s which jobs are near their end: of one minute, a job has trained 15 to 45 s when it is told.
PROFILE = 'lead_s = 15\noptions = ["--exclusive"]'
LONG = ("batch.global_size=16", "epochs=25", "checkpoint.every=end", "log.every_steps=1")
ONE_NODE = ("slow_then_fast.py", "--ranks-per-node", "1")
TWO_RANKS = ("--ranks-per-node", "2", "--time", "10", "slow_then_fast.py")
SAVING = ("--time", "10", "checkpoint.every=5steps")
TWO_NODES = ("slow_then_fast.py", "--nodes", "2", "--ranks-per-node", "1")
SLOW_PYTHON = """
import os, sys, time
first = "SLURM_PROCID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
if first and "paceline.launch.rank_srun" in sys.orig_argv:  # a rank, not what else the job runs
    print("not listening yet", flush=True)
    time.sleep(1000)
"""
_PATIENCE_S = 480


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    return digest(subprocess.check_output([sys.executable, SCRIPT, *LONG], cwd=folder, text=True))


Scenario = Callable[[Desk], str]
SCENARIOS: list[tuple[str, Scenario]] = []


def scenario(*ways: str) -> Callable[[Scenario], Scenario]:
    """Let a scenario be played on a cluster that tracks the processes of a job in one way, or on both."""

    def enter(function: Scenario) -> Scenario:
        SCENARIOS.extend((way, function) for way in ways)
        return function

    return enter


def is_heavy(play: Scenario) -> bool:
    return play is not time_limit


@pytest.fixture(scope="module")
def plays(alone: str) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """All scenarios, played at the same time; they begin when there is something to compare them with."""
    all_of_them = bool(os.environ.get("PACELINE_HEAVY"))
    chosen = [(way, play) for way, play in SCENARIOS if all_of_them or not is_heavy(play)]
    with contextlib.ExitStack() as stack:
        desks = {}
        for way in dict(chosen):
            count = sum(each == way for each, _ in chosen)
            how = {"cpus": 2, "gpus": 0, "grace": 20, "cgroup": way == "cgroup"}
            # Two nodes for each, and two to spare for those that leave out a node.
            nodes = 2 * count + 2 * all_of_them
            settings = wanted(nodes=nodes, settings={"SlurmdTimeout": 15}, **how)
            desks[way] = Desk.on(stack.enter_context(cluster_or_skip(settings)), PROFILE)
        pool = stack.enter_context(ThreadPoolExecutor(len(chosen)))
        played = {(way, play.__name__): pool.submit(play, desks[way]) for way, play in chosen}
        # A test that looks for what it has left must not find what these have started.
        wait(played.values())
        yield played


def finished(desk: Desk, name: str, job: str) -> str:
    """See that a job has ended well, and return its log."""
    facts = desk.cluster.wait(job, timeout_s=_PATIENCE_S)
    log = desk.log(name, job)
    assert facts["JobState"] == "COMPLETED", log
    begun = [event for event in desk.events(name) if event["event"] == "RunStarted"]
    assert len(begun) >= 2, log
    return log


def nothing_repeated(desk: Desk, name: str) -> None:
    """See that no start of a run did a step that an earlier one had done."""
    last = 0
    for event in desk.events(name):
        if event["event"] == "RunStarted":
            assert event["from_step"] == last
        elif event["event"] == "StepDone":
            last = event["step"]


def submitted(
    desk: Desk, name: str, *words: str, until: str = "epoch 1/25", slow: str = "0.2"
) -> str:
    """Submit a run, and wait until its log holds a text."""
    given = around(words[0], (*LONG, f"name={name}", *words[1:]))
    job = desk.submit(*given, env={"SLOW_STEP": slow})
    if until:
        desk.await_line(name, job, until, timeout_s=_PATIENCE_S)
    return job


def given_time(desk: Desk, name: str, job: str, reason: str) -> None:
    """Raise the time limit of a job that has met it: a busy machine may need more for the rest."""
    desk.await_line(name, job, f"{reason}; requeued", timeout_s=_PATIENCE_S)
    done = desk.cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10"])
    assert done.code == 0, done.err


@scenario("cgroup")
def time_limit(desk: Desk) -> str:
    # At 0.2 s the steps would end before the limit.
    job = submitted(desk, "limit", *TWO_NODES, "--time", "1", until="", slow="0.5")
    given_time(desk, "limit", job, "saved and stopped")
    log = finished(desk, "limit", job)
    assert "asking the ranks to save and exit" in log
    nothing_repeated(desk, "limit")
    return log


@scenario("cgroup")
def stuck(desk: Desk) -> str:
    """Ranks that hear nothing are killed at the limit, and the job goes on all the same."""
    job = desk.submit(
        *ONE_NODE[1:], "--time", "1", ONE_NODE[0], *LONG, "name=stuck", env={"DEAF": "1"}
    )
    given_time(desk, "stuck", job, "the ranks did not exit in time")
    desk.cluster.wait(job, timeout_s=_PATIENCE_S)
    return desk.log("stuck", job)


@scenario("linuxproc", "cgroup")
def told_early(desk: Desk) -> str:
    """Ranks that have not met yet leave at once, all of them, and the job starts again."""
    job = desk.submit(*TWO_RANKS, *LONG, "name=early", env={"HESITANT": "1"})
    desk.await_line("early", job, "not met yet", timeout_s=_PATIENCE_S, times=2)
    desk.cluster.run(["scancel", "--signal=TERM", job])
    return _started_again(desk, "early", job, "saved and stopped")


@scenario("cgroup")
def told_before_it_listens(desk: Desk) -> str:
    """Ranks whose Python is not up yet die of the signal, and that is no failure."""
    (desk.folder / "slow").mkdir()
    (desk.folder / "slow" / "sitecustomize.py").write_text(SLOW_PYTHON)
    env = {"PYTHONPATH": str(desk.folder / "slow")}
    job = desk.submit(*TWO_RANKS, *LONG, "name=unheard", env=env)
    desk.await_line("unheard", job, "not listening yet", timeout_s=_PATIENCE_S, times=2)
    desk.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    return _started_again(desk, "unheard", job, "asked to stop before the training had started")


def _started_again(desk: Desk, name: str, job: str, reason: str) -> str:
    """See that a job was requeued for a reason and then ended well, and return its log."""
    facts = desk.cluster.wait(job, timeout_s=_PATIENCE_S)
    log = desk.log(name, job)
    assert facts["JobState"] == "COMPLETED", log
    assert f"{reason}; requeued" in log
    return log


@scenario("linuxproc", "cgroup")
def told_by_srun(desk: Desk) -> str:
    return _told(desk, "told", "srun")


@scenario("cgroup")
def told_under_agents(desk: Desk) -> str:
    return _told(desk, "agents", "torchrun")


def _told(desk: Desk, name: str, launcher: str) -> str:
    words = ("--time", "10", "--launcher", launcher, "resume=never")  # the first start alone may
    job = submitted(desk, name, *TWO_NODES, *words)
    desk.cluster.run(["scancel", "--signal=TERM", job])
    log = finished(desk, name, job)
    nothing_repeated(desk, name)
    return log


@scenario("cgroup")
def preempted(desk: Desk) -> str:
    job = submitted(desk, "preempted", *ONE_NODE, "--time", "10", "--partition", "low")
    nodes = desk.cluster.job(job)["NodeList"]
    desk.cluster.sbatch("--partition=high", f"--nodelist={nodes}", "--exclusive", "--wrap=sleep 3")
    log = finished(desk, "preempted", job)
    nothing_repeated(desk, "preempted")
    return log


@scenario("cgroup")
def out_of_sight(desk: Desk) -> str:
    """A rank lives on where Slurm cannot see it: the link is cut, and here the disk is still shared."""
    words = ("training.py", "--ranks-per-node", "1")
    job = submitted(desk, "unseen", *words, *SAVING, until="saved ")
    desk.cluster.link(desk.cluster.job(job)["NodeList"], "down")
    desk.await_line("unseen", job, "start 2, on ", timeout_s=_PATIENCE_S)
    log = desk.await_line("unseen", job, "was taken over by process", timeout_s=_PATIENCE_S)
    assert "fix: nothing to do: that process resumes" in log
    return finished(desk, "unseen", job)


@scenario("cgroup")
def daemon_died(desk: Desk) -> str:
    job = submitted(desk, "daemon", *TWO_NODES, *SAVING, until="saved ")
    desk.cluster.slurmd(desk.cluster.job(job)["BatchHost"], "kill")
    return finished(desk, "daemon", job)


def kill_rank(desk: Desk, node: str) -> None:
    words = ["sh", "-c", "kill -9 $(pgrep -f [p]aceline.launch.rank_srun | tail -1)"]
    killed = desk.cluster.run(words, node=node)
    assert killed.code == 0, killed.err


@scenario("cgroup")
def rank_killed(desk: Desk) -> str:
    """A node whose rank was killed is left out from then on."""
    job = submitted(desk, "killed", *TWO_NODES, *SAVING, until="saved ")
    # The second: on the first, srun bears the name as well.
    host = expand_hostlist(desk.cluster.job(job)["NodeList"])[1]
    kill_rank(desk, host)
    log = finished(desk, "killed", job)
    assert f"excluding {host}" in log, log
    assert desk.cluster.job(job)["ExcNodeList"] == host
    return log


@scenario("cgroup")
def chain(desk: Desk) -> str:
    """A site that forbids requeueing: the next job goes on, and those that are not needed any more are cancelled."""
    first = submitted(desk, "chain", *ONE_NODE, "--time", "10", "--jobs", "4")
    jobs = (desk.folder / "runs" / "chain" / "jobs" / "chain").read_text().split()
    assert jobs[0] == first
    assert len(jobs) == 4
    desk.cluster.run(["scancel", "--signal=USR1", first])
    log = finished(desk, "chain", jobs[1])
    assert "the next job of the chain continues" in desk.log("chain", first)
    limit = time.monotonic() + _PATIENCE_S
    while [desk.cluster.job(job)["JobState"] for job in jobs[2:]] != ["CANCELLED", "CANCELLED"]:
        assert time.monotonic() < limit
        time.sleep(0.2)
    return log


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, play.__name__, marks=[pytest.mark.heavy] * is_heavy(play))
        for way, play in SCENARIOS
    ],
)
def test_the_run_ends_with_the_bits_of_one_that_was_left_alone(
    plays, alone: str, way: str, name: str
) -> None:
    assert digest(plays[way, name].result()) == alone


@pytest.mark.heavy
@pytest.mark.slurm(nodes=1, cpus=2, gpus=0)
def test_a_run_that_cannot_begin_is_not_tried_again(slurm) -> None:
    desk = Desk.on(slurm)
    settings = ("batch.lanes=1", "batch.global_size=8")
    job = desk.submit("--ranks-per-node", "2", "--time", "10", "training.py", *settings)
    assert slurm.wait(job, timeout_s=240)["JobState"] == "FAILED"
    log = desk.log("training", job)
    # Once, and not for each rank, nor for each start.
    assert log.count("fix: set batch.lanes=2") == 1, log
    assert "; requeued" not in log


@pytest.mark.heavy
@pytest.mark.slurm(nodes=1, cpus=2, gpus=0)
def test_the_only_node_is_not_excluded(slurm) -> None:
    """A job without enough other nodes would wait in the queue for ever."""
    desk = Desk.on(slurm)
    job = submitted(desk, "only", *ONE_NODE, *SAVING, "epochs=2", until="saved ")
    kill_rank(desk, slurm.job(job)["NodeList"])
    log = finished(desk, "only", job)
    assert "failed with exit code 137; requeued" in log
    assert "excluding" not in log
