"""Does a job end with the same bits, however often Slurm ends it? Many jobs on a private Slurm, ended in four ways.

    python scripts/requeue.py --runs 20 --at-once 4 --seed 7

Needs root and Debian's packages, as the tests marked slurm do. A run that repeats more than one step, or ends with other
bits than one process that nobody disturbs, is counted as lost; so is one that was done before it could be ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.private_cluster import private_cluster, wanted  # noqa: E402 - tests are not a package
from support.submitting import SCRIPT, Desk, digest  # noqa: E402

TRAINING = ("batch.global_size=16", "epochs=8", "checkpoint.every=10steps", "log.every_steps=1")
PROFILE = 'lead_s = 45\noptions = ["--exclusive"]'
_PATIENCE_S = 1800.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """How one run went."""

    digest: str
    starts: int
    """How often Slurm started the job."""
    repeated: int
    """Most steps that a start did again."""
    problem: str = ""


Disturb = Callable[[Desk, str, str, random.Random], None]


def main() -> None:
    """Run all kinds, and print a table."""
    known = _arguments()
    alone = _alone()
    print(
        f"{'ended by':<12}{'runs':>5}{'same bits':>11}{'starts':>8}{'most steps repeated':>21}{'seconds':>9}"
    )
    lost = 0
    for kind in known.kinds.split(","):
        begun = time.monotonic()
        outcomes = _play(kind, known)
        good = [
            one for one in outcomes if one.digest == alone and one.repeated <= 1 and one.starts > 1
        ]
        lost += len(outcomes) - len(good)
        starts = sum(one.starts for one in outcomes) / len(outcomes)
        repeated = max(one.repeated for one in outcomes)
        print(
            f"{kind:<12}{len(outcomes):>5}{len(good):>11}{starts:>8.1f}{repeated:>21}{time.monotonic() - begun:>9.0f}",
            flush=True,
        )
        for one in outcomes:
            if one not in good:
                print(f"  lost: {one}", file=sys.stderr)
    sys.exit(1 if lost else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20, help="runs of each kind")
    parser.add_argument("--at-once", type=int, default=4, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=7, help="of the moments")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which ways to end a job")
    parser.add_argument(
        "--no-cgroup", action="store_true", help="track processes as Slurm does without cgroups"
    )
    return parser.parse_args()


def _play(kind: str, known: argparse.Namespace) -> list[Outcome]:
    nodes = 3 * known.at_once
    settings = wanted(
        nodes=nodes,
        cpus=2,
        gpus=0,
        grace=20,
        cgroup=not known.no_cgroup,
        settings={"SlurmdTimeout": 15},
    )
    quiet = contextlib.redirect_stdout(io.StringIO())  # what the daemons said
    with quiet, private_cluster(settings) as cluster, ThreadPoolExecutor(known.at_once) as pool:
        desk = Desk.on(cluster, PROFILE)
        return list(
            pool.map(lambda number: _one(desk, kind, number, known.seed), range(known.runs))
        )


def _one(desk: Desk, kind: str, number: int, seed: int) -> Outcome:
    name, chance = f"{kind}-{number}", random.Random(f"{seed}-{kind}-{number}")
    limit = "1" if kind == "limit" else "20"
    partition = ("--partition", "low") if kind == "preempt" else ()
    # Long enough to be ended, also on a quick machine; and Slurm needs its time to notice a daemon that is gone.
    script, slow = {
        "slurmd": ("slow_then_fast.py", "1.2"),
        "limit": ("training.py", "0.4"),
    }.get(kind, ("training.py", "0.25"))
    words = ("--nodes", "2", "--ranks-per-node", "1", "--time", limit, *partition, script)
    try:
        job = desk.submit(*words, *TRAINING, f"name={name}", env={"SLOW_STEP": slow})
        KINDS[kind](desk, name, job, chance)
        state = desk.cluster.wait(job, timeout_s=_PATIENCE_S)["JobState"]
        log = desk.log(name, job)
        if state != "COMPLETED":
            return Outcome("", 0, 0, f"{state}: {log[-2000:]}")
        return Outcome(
            digest(log),
            len(re.findall(r"job \d+, start \d+, on ", log)),
            _most_repeated(desk.events(name)),
        )
    except AssertionError as error:
        return Outcome("", 0, 0, str(error)[-2000:])


def _most_repeated(events: list[dict[str, object]]) -> int:
    """Return the most steps that a start did again."""
    repeated, last = 0, 0
    for event in events:
        if event["event"] == "RunStarted":
            repeated = max(repeated, last - int(str(event["from_step"])))
        elif event["event"] == "StepDone":
            last = int(str(event["step"]))
    return repeated


def _wait_for_limit(desk: Desk, name: str, job: str, chance: random.Random) -> None:
    """Slurm does it."""


def _signal(desk: Desk, name: str, job: str, chance: random.Random) -> None:
    """Send SIGTERM to the steps, twice, each time at some moment after the job has begun."""
    for start in (1, 2):
        while f"start {start}, on " not in (log := desk.log(name, job)):
            if "done: " in log:
                return  # the signal came too late
            time.sleep(_LOOK_S)
        time.sleep(chance.uniform(0.5, 14.0))
        desk.cluster.run(["scancel", "--signal=TERM", job])


def _preempt(desk: Desk, name: str, job: str, chance: random.Random) -> None:
    desk.await_line(name, job, "start 1, on ", timeout_s=_PATIENCE_S)
    time.sleep(chance.uniform(0.5, 14.0))
    nodes = desk.cluster.job(job)["NodeList"]
    desk.cluster.sbatch("--partition=high", f"--nodelist={nodes}", "--exclusive", "--wrap=sleep 2")


def _kill_slurmd(desk: Desk, name: str, job: str, chance: random.Random) -> None:
    """Kill the daemon of one of the job's nodes; bring it back once the job runs elsewhere."""
    desk.await_line(name, job, "epoch 1/", timeout_s=_PATIENCE_S)
    time.sleep(chance.uniform(0.0, 2.0))
    hosts = desk.cluster.run(
        ["scontrol", "show", "hostnames", desk.cluster.job(job)["NodeList"]]
    ).out.split()
    host = chance.choice(hosts)
    desk.cluster.slurmd(host, "kill")
    while "start 2, on " not in (log := desk.log(name, job)) and "done: " not in log:
        time.sleep(_LOOK_S)
    desk.cluster.slurmd(host, "start")
    desk.cluster.run(["scontrol", "update", f"NodeName={host}", "State=RESUME"])


KINDS: dict[str, Disturb] = {
    "limit": _wait_for_limit,
    "signal": _signal,
    "preempt": _preempt,
    "slurmd": _kill_slurmd,
}


def _alone() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, SCRIPT, *TRAINING],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return digest(done.stdout)


if __name__ == "__main__":
    main()
