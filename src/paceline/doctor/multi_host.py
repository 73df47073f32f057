"""How several hosts are looked at together: in a Slurm allocation by srun, elsewhere by the same command on every host."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from paceline import handover
from paceline.cluster import slurm
from paceline.cluster.allocation import Allocation, step_environment
from paceline.doctor.collector import Collector
from paceline.doctor.cross_host import (
    AllocationRequest,
    judge_affinity,
    judge_clocks,
    judge_connectivity,
    judge_missing_ranks,
    judge_request,
    judge_versions,
)
from paceline.doctor.finding import Finding, all_ok, merged
from paceline.doctor.rank import look, report
from paceline.doctor.rank_facts import RankFacts
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.world.address import choose_address, listen_at, refuse_loopback_name, resolve
from paceline.world.world import World

SECRET = "PACELINE_DOCTOR_SECRET"  # noqa: S105 - the name of a variable
"""A word that all hosts are told, where no scheduler tells it to them."""
_ENDS_WITHIN_S = 5.0
_MOST_PRINTED = 1 << 20


@dataclass(frozen=True)
class Examination:
    """What was found on all hosts, and on how many."""

    findings: list[Finding]
    hosts: int
    ranks: int


@dataclass(frozen=True)
class ExaminationPlan:
    """How hosts are looked at."""

    ranks: int
    """Of each host."""
    runs: Path
    """Where runs will be written."""
    wait_s: float
    quick: bool = False
    """Whether torch is left out."""


def examine_allocation(
    allocation: Allocation, plan: ExaminationPlan, env: Mapping[str, str]
) -> Examination:
    """Start as many ranks on every node as a training would have, and put together what they say."""
    slurm.require("srun")
    nodes = len(allocation.nodes)
    size = plan.ranks * nodes
    address = choose_address("", allocation.nodes, env.get(handover.INTERFACE, ""))
    listener = listen_at(address, 0)
    told = {"address": address, "port": listener.getsockname()[1], "secret": secrets.token_hex(16)}
    told |= {
        "runs": str(plan.runs),
        "wait_s": plan.wait_s,
        "quick": plan.quick,
        "nodes": allocation.nodes,
    }
    words = [
        *allocation.srun_command(plan.ranks),
        f"--nodelist={','.join(allocation.nodes)}",
        *_RANK,
    ]
    surroundings = step_environment(env) | {handover.DOCTOR: json.dumps(told)}
    with (
        tempfile.TemporaryFile() as output,
        Collector(listener, str(told["secret"]), size) as reception,
        _started(words, surroundings, output) as process,
    ):
        # A rank that cannot come prints why, and leaves.
        came = reception.examine(
            plan.wait_s,
            lambda: process.poll() is not None or reception.came + len(_printed(output)) >= size,
        )
        found = _judge(came, size, _printed(output), request_from(env, allocation))
        reception.dismiss(ok=all_ok(found))
        return Examination(found, nodes, size)


_RANK = (sys.executable, "-u", "-m", "paceline.doctor.rank")


@contextlib.contextmanager
def _started(
    words: Sequence[str], env: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env=dict(env), stdin=subprocess.DEVNULL, stdout=output)
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_WITHIN_S)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _printed(output: IO[bytes]) -> list[tuple[str, str, str]]:
    """Return why ranks could not report, as far as they could print it: host, problem and fix of each."""
    found = []
    for line in os.pread(output.fileno(), _MOST_PRINTED, 0).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            found.append((str(said["host"]), str(said["problem"]), str(said["fix"])))
    return found


def examine_together(
    node: int,
    hosts: Sequence[str],
    meet: tuple[str, int],
    plan: ExaminationPlan,
    env: Mapping[str, str],
) -> Examination | bool:
    """Look at this host, one of several; the first puts together what all say, the others return whether all was well."""
    nodes = len(hosts)
    peers = (*hosts[:node], *hosts[node + 1 :])
    world = World(
        node,
        nodes,
        0,
        plan.ranks,
        node,
        nodes,
        "paceline",
        interface=env.get(handover.INTERFACE, ""),
    )
    secret = env.get(SECRET, "")
    told = {"address": meet[0], "port": str(meet[1]), "secret": secret, "wait_s": str(plan.wait_s)}

    def tell() -> bool:
        facts = look(world, env, plan.runs, peers, quick=plan.quick)
        try:
            return bool(report(world, told, facts).get("ok"))
        except OSError as error:
            raise EnvironmentUnfit(
                f"{meet[0]}:{meet[1]} did not take the report: {error}",
                fix=f"see whether the first host still waits (--wait), with the same --nodes and the same {SECRET}, or none; each host has a --node of its own",
            ) from error

    if node:
        return tell()
    refuse_loopback_name(meet[0])
    with Collector(listen_at(*meet), secret, nodes) as reception, ThreadPoolExecutor(1) as pool:
        own = pool.submit(tell)
        came = reception.examine(plan.wait_s, lambda: own.done() and own.exception() is not None)
        found = _judge(came, nodes, [], None)
        reception.dismiss(ok=all_ok(found))
        own.result()
        return Examination(found, nodes, nodes)


def _judge(
    came: Sequence[RankFacts],
    size: int,
    printed: Sequence[tuple[str, str, str]],
    request: AllocationRequest | None,
) -> list[Finding]:
    if not came:
        return [judge_missing_ranks(came, size, printed)]
    named = _with_names(came)
    by_host = merged([(one.host, one.found) for one in named if one.found])
    found = [
        judge_missing_ranks(named, size, printed),
        *by_host,
        judge_versions(named),
        *judge_clocks(named),
        *judge_connectivity(named),
    ]
    return [*found, *judge_affinity(named), *(judge_request(request, named) if request else [])]


def _with_names(came: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the facts with names of hosts that tell them apart: two may call themselves the same."""
    nodes: dict[str, set[int]] = {}
    for one in came:
        nodes.setdefault(one.host, set()).add(one.node)
    return [
        one if len(nodes[one.host]) == 1 else replace(one, host=f"{one.host}#{one.node}")
        for one in came
    ]


def select_nodes(allocation: Allocation, wanted: Sequence[str]) -> Allocation:
    """Return the part of an allocation that was asked for; all of it, if nothing was."""
    if strange := [name for name in wanted if name not in allocation.nodes]:
        raise ConfigError(
            f"--nodes: {', '.join(strange)} is not in this allocation",
            fix=f"name some of: {', '.join(allocation.nodes)}",
        )
    return replace(allocation, nodes=tuple(wanted)) if wanted else allocation


def request_from(env: Mapping[str, str], allocation: Allocation) -> AllocationRequest:
    """Return what Slurm was asked for.

    >>> request_from({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_PER_TASK": "4"}, Allocation(("a", "b"), 2, is_local=False))
    Request(job='7', nodes=2, tasks=0, tasks_on=(2, 2), cpus_per_task=4, gpus_per_node=0)
    """
    return AllocationRequest(
        job=env.get("SLURM_JOB_ID", ""),
        nodes=len(allocation.nodes),
        tasks=_number(env.get("SLURM_NTASKS", "")),
        tasks_on=tuple(_each(env.get("SLURM_TASKS_PER_NODE", ""))),
        cpus_per_task=_number(env.get("SLURM_CPUS_PER_TASK", "")),
        gpus_per_node=_number(
            env.get("SLURM_GPUS_ON_NODE", "")
            or env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        ),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _each(text: str) -> Iterator[int]:
    for word in filter(None, text.split(",")):
        count, _, times = word.partition("(x")
        yield from [_number(count)] * (_number(times.rstrip(")")) or 1)


def own_index(hosts: Sequence[str], own: Sequence[str]) -> int | None:
    """Return which of some hosts this one is, by its name and its addresses."""
    for place, host in enumerate(hosts):
        if host == os.uname().nodename or set(resolve(host)) & set(own):
            return place
    return None
