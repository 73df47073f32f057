"""A training on two or three hosts of their own (network namespaces), of which one is cut off. Used by faults.py; needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.private_cluster import TOOL, PrivateCluster, private_cluster, wanted, why_not

SCRIPT = Path(__file__).with_name("faulty_training.py")
MOST = 4
_BEGINS_S = 120.0
_MOVES_S = 1.0


def why_not_here() -> str:
    """Return why hosts cannot be made here; nothing if they can."""
    return why_not(wanted(nodes=2, slurm=False))


@contextlib.contextmanager
def cut_off(ranks: int, rank: int, mark: Path) -> Iterator[Path]:
    """Train on as many hosts as ranks, and cut off that of one rank once steps are done; give the folder of it."""
    with (
        private_cluster(wanted(nodes=ranks, slurm=False)) as hosts,
        contextlib.ExitStack() as stack,
    ):
        for node in range(ranks):
            stack.enter_context(_started(hosts, node, ranks))
        _await_steps(hosts.work / "runs" / "run")
        mark.touch()
        hosts.link(f"n{rank + 1}", "down")
        yield hosts.work


@contextlib.contextmanager
def _started(hosts: PrivateCluster, node: int, nodes: int) -> Iterator[None]:
    where = [
        "-n",
        "1",
        "--nodes",
        str(nodes),
        "--node",
        str(node),
        "--rendezvous",
        "n1:29400",
        "--max-restarts",
        "0",
    ]
    what = ["batch.global_size=32", "timeout.step_s=60", "epochs=100", "log.every_steps=5"]
    command = [*TOOL, "--dir", str(hosts.place.folder), "run", "--node", f"n{node + 1}", "--"]
    with (hosts.work / f"log{node}").open("wb") as log:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "paceline", "run", *where, str(SCRIPT), *what],
            cwd=hosts.work, env=os.environ | {"FAULT": ""}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield
    finally:
        process.kill()  # what it has started ends with its host
        process.wait()


def _await_steps(run: Path) -> None:
    limit = time.monotonic() + _BEGINS_S
    while not _has_steps(run / "events.jsonl"):
        if time.monotonic() > limit:
            raise TimeoutError(f"no step in {_BEGINS_S:.0f} s")
        time.sleep(0.1)
    time.sleep(_MOVES_S)


def _has_steps(events: Path) -> bool:
    return events.exists() and events.read_text().count('"StepDone"') > 1
