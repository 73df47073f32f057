"""How several hosts are examined together: in a Slurm allocation by srun, else by hand on each."""

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
from paceline.doctor.finding import Finding, all_ok, merge_hosts
from paceline.doctor.rank import gather_facts, report
from paceline.doctor.rank_facts import RankFacts
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.world.address import choose_address, listen_at, refuse_loopback_name, resolve
from paceline.world.world import World

SECRET = "PACELINE_DOCTOR_SECRET"  # noqa: S105 - the name of a variable
"""The shared secret of the hosts; under Slurm it is made and passed on automatically."""
_EXIT_S = 5.0
_MAX_OUTPUT = 1 << 20
_RANK = (sys.executable, "-u", "-m", "paceline.doctor.rank")


@dataclass(frozen=True)
class Examination:
    """The findings of all hosts, and how many hosts and ranks there were."""

    findings: list[Finding]
    hosts: int
    ranks: int


@dataclass(frozen=True)
class ExaminationPlan:
    """Options of an examination."""

    ranks: int
    """Ranks per host."""
    runs: Path
    """The folder for runs."""
    wait_s: float
    quick: bool = False
    """Whether to skip the checks of torch."""


def examine_allocation(
    allocation: Allocation, plan: ExaminationPlan, env: Mapping[str, str]
) -> Examination:
    """Start as many ranks on every node as a training would have, and judge their reports."""
    slurm.require("srun")
    nodes = len(allocation.nodes)
    size = plan.ranks * nodes
    address = choose_address("", allocation.nodes, env.get(handover.INTERFACE, ""))
    listener = listen_at(address, 0)
    secret = secrets.token_hex(16)
    order = {
        "address": address,
        "port": listener.getsockname()[1],
        "secret": secret,
        "runs": str(plan.runs),
        "wait_s": plan.wait_s,
        "quick": plan.quick,
        "nodes": allocation.nodes,
    }
    node_list = f"--nodelist={','.join(allocation.nodes)}"
    command = [*allocation.srun_command(plan.ranks), node_list, *_RANK]
    step_env = step_environment(env) | {handover.DOCTOR: json.dumps(order)}
    with (
        tempfile.TemporaryFile() as output,
        Collector(listener, secret, size) as collector,
        _started(command, step_env, output) as process,
    ):

        def is_over() -> bool:  # a rank that cannot report prints why, and exits
            failed = len(_printed_errors(output))
            return process.poll() is not None or collector.connected + failed >= size

        ranks = collector.examine(plan.wait_s, is_over)
        request = request_from(env, allocation)
        findings = _judge(ranks, size, _printed_errors(output), request)
        collector.dismiss(ok=all_ok(findings))
        return Examination(findings, nodes, size)


@contextlib.contextmanager
def _started(
    command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output)
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _printed_errors(output: IO[bytes]) -> list[tuple[str, str, str]]:
    """Return host, problem and fix of each rank that printed why it could not report."""
    errors = []
    text = os.pread(output.fileno(), _MAX_OUTPUT, 0).decode(errors="replace")
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(line)
            errors.append((str(error["host"]), str(error["problem"]), str(error["fix"])))
    return errors


def examine_together(
    node: int,
    hosts: Sequence[str],
    meet: tuple[str, int],
    plan: ExaminationPlan,
    env: Mapping[str, str],
) -> Examination | bool:
    """Examine this host as one of several; the first judges all, others return if all were ok."""
    nodes = len(hosts)
    secret = env.get(SECRET, "")
    if node:
        return _report_from(node, hosts, meet, plan, env)
    refuse_loopback_name(meet[0])
    with Collector(listen_at(*meet), secret, nodes) as collector, ThreadPoolExecutor(1) as pool:
        own = pool.submit(_report_from, node, hosts, meet, plan, env)
        ranks = collector.examine(plan.wait_s, lambda: own.done() and own.exception() is not None)
        findings = _judge(ranks, nodes, [], None)
        collector.dismiss(ok=all_ok(findings))
        own.result()
        return Examination(findings, nodes, nodes)


def _report_from(
    node: int,
    hosts: Sequence[str],
    meet: tuple[str, int],
    plan: ExaminationPlan,
    env: Mapping[str, str],
) -> bool:
    nodes, interface = len(hosts), env.get(handover.INTERFACE, "")
    world = World(node, nodes, 0, plan.ranks, node, nodes, "paceline", interface=interface)
    order = {
        "address": meet[0],
        "port": str(meet[1]),
        "secret": env.get(SECRET, ""),
        "wait_s": str(plan.wait_s),
    }
    peers = (*hosts[:node], *hosts[node + 1 :])
    facts = gather_facts(world, env, plan.runs, peers, quick=plan.quick)
    try:
        return bool(report(world, order, facts).get("ok"))
    except OSError as error:
        raise EnvironmentUnfit(
            f"{meet[0]}:{meet[1]} did not accept the report: {error}",
            fix="check that the first host still waits (--wait), with the same --nodes and the "
            f"same {SECRET} (or none), and that each host has its own --node",
        ) from error


def _judge(
    ranks: Sequence[RankFacts],
    size: int,
    errors: Sequence[tuple[str, str, str]],
    request: AllocationRequest | None,
) -> list[Finding]:
    if not ranks:
        return [judge_missing_ranks(ranks, size, errors)]
    named = _with_unique_names(ranks)
    by_host = [(rank.host, rank.findings) for rank in named if rank.findings]
    findings = [
        judge_missing_ranks(named, size, errors),
        *merge_hosts(by_host),
        judge_versions(named),
        *judge_clocks(named),
        *judge_connectivity(named),
        *judge_affinity(named),
    ]
    if request:
        findings += judge_request(request, named)
    return findings


def _with_unique_names(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the facts with the node number appended to host names that occur twice."""
    nodes: dict[str, set[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank.host, set()).add(rank.node)
    named = []
    for rank in ranks:
        unique = len(nodes[rank.host]) == 1
        named.append(rank if unique else replace(rank, host=f"{rank.host}#{rank.node}"))
    return named


def select_nodes(allocation: Allocation, wanted: Sequence[str]) -> Allocation:
    """Return the allocation reduced to the wanted nodes; all of it if none are named."""
    unknown = [name for name in wanted if name not in allocation.nodes]
    if unknown:
        raise ConfigError(
            f"--nodes: {', '.join(unknown)} is not in this allocation",
            fix=f"use nodes of the allocation: {', '.join(allocation.nodes)}",
        )
    return replace(allocation, nodes=tuple(wanted)) if wanted else allocation


def request_from(env: Mapping[str, str], allocation: Allocation) -> AllocationRequest:
    """Return the resources that Slurm's variables say the job requested.

    >>> env = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_PER_TASK": "4"}
    >>> request = request_from(env, Allocation(("a", "b"), 2, is_local=False))
    >>> request.nodes, request.tasks_on, request.cpus_per_task
    (2, (2, 2), 4)
    """
    gpus = env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return AllocationRequest(
        job=env.get("SLURM_JOB_ID", ""),
        nodes=len(allocation.nodes),
        tasks=_number(env.get("SLURM_NTASKS", "")),
        tasks_on=tuple(_tasks_per_node(env.get("SLURM_TASKS_PER_NODE", ""))),
        cpus_per_task=_number(env.get("SLURM_CPUS_PER_TASK", "")),
        gpus_per_node=_number(env.get("SLURM_GPUS_ON_NODE", "") or gpus),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _tasks_per_node(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        count, _, times = part.partition("(x")
        yield from [_number(count)] * (_number(times.rstrip(")")) or 1)


def own_index(hosts: Sequence[str], own: Sequence[str]) -> int | None:
    """Return the position of this host among `hosts`, by its name or its own addresses."""
    for index, host in enumerate(hosts):
        if host == os.uname().nodename or set(resolve(host)) & set(own):
            return index
    return None
