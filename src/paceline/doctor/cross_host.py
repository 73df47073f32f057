"""Whether the ranks fit together: versions, clocks, ways between hosts, cores, and what Slurm was asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.doctor.finding import Finding, passed, problem
from paceline.doctor.rank_facts import RankFacts
from paceline.doctor.resources import spans
from paceline.units import short_time

_APART_S = 1.0
_SHOWN = 6


def judge_missing_ranks(
    ranks: Sequence[RankFacts], size: int, said: Sequence[tuple[str, str, str]]
) -> Finding:
    """Judge whether all ranks came; `said` is what those printed that could not report: host, problem and fix."""
    missing = sorted(set(range(size)) - {one.rank for one in ranks})
    if not missing:
        return passed("ranks", f"all {size} came, from {len({one.node for one in ranks})} hosts")
    for host, why, fix in said[:1]:
        return problem(
            "ranks",
            f"rank{'s' * (len(missing) > 1)} {spans(missing)} of {size} did not come; {host} says: {why}",
            fix,
        )
    return problem(
        "ranks",
        f"rank{'s' * (len(missing) > 1)} {spans(missing)} of {size} did not come",
        "see what their hosts print above; `sinfo -R` names nodes that are down",
    )


def judge_versions(ranks: Sequence[RankFacts]) -> Finding:
    """Judge whether all ranks run the same.

    >>> facts = [RankFacts(rank, f"n{rank}", rank, 0, {"torch": "2.13" if rank else "2.12"}, (0,)) for rank in range(3)]
    >>> judge_versions(facts).says
    'torch differs: 2.12 on n0; 2.13 on n1, n2'
    """
    for name in sorted({name for one in ranks for name in one.versions}):
        found: dict[str, list[str]] = {}
        for one in ranks:
            found.setdefault(one.versions.get(name, "none"), []).append(one.host)
        if len(found) > 1:
            words = "; ".join(f"{version} on {_some(hosts)}" for version, hosts in found.items())
            return problem(
                "versions",
                f"{name} differs: {words}",
                "start all ranks from one environment, on a shared disk or packed: `paceline doctor --pack`",
            )
    same = ranks[0].versions
    return passed(
        "versions",
        ", ".join(
            f"{name} {same[name]}" for name in ("python", "torch", "paceline") if name in same
        )
        + " on all ranks",
    )


def _some(hosts: Sequence[str]) -> str:
    unlike = list(dict.fromkeys(hosts))
    return ", ".join(unlike[:_SHOWN]) + (
        f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    )


def judge_clocks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether the hosts agree what time it is: where they are 15 s apart, torchrun takes live nodes for dead."""
    hosts = [one for one in ranks if one.local_rank == 0 and math.isfinite(one.clock_error_s)]
    if len(hosts) < 2:
        return
    first, last = min(hosts, key=lambda one: one.clock_s), max(hosts, key=lambda one: one.clock_s)
    apart = last.clock_s - first.clock_s
    doubt = first.clock_error_s + last.clock_error_s
    if apart - doubt > _APART_S:
        yield problem(
            "clocks",
            f"{last.host} is {apart:.1f} s ahead of {first.host}",
            f"start chrony or ntpd on both: `timedatectl status` on {first.host} and {last.host}",
        )
    else:
        yield passed("clocks", f"at most {short_time(apart + doubt)} apart")


def judge_connectivity(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether every host reaches every other, each way, at free ports."""
    hosts = {one.node: one for one in ranks if one.local_rank == 0}
    if len(hosts) < 2:
        return
    closed = [
        (one, hosts[node], why)
        for one in hosts.values()
        for node, why in one.unreached.items()
        if node in hosts
    ]
    if not closed:
        yield passed(
            "ways",
            f"all {len(hosts) * (len(hosts) - 1)} ways between {len(hosts)} hosts are open, at any port",
        )
        return
    fix = "open the firewall between them for all ports above 1023, or name the interface that joins them: PACELINE_INTERFACE"
    count = Counter(end.node for one, other, _ in closed for end in (one, other))
    worst, often = count.most_common(1)[0]
    if len(hosts) > 2 and often >= 2 * (len(hosts) - 1):
        reason = next(why for one, other, why in closed if worst in {one.node, other.node})
        yield problem(
            "ways",
            f"no other host reaches {hosts[worst].host}: {reason}",
            f"{fix}; or leave it out: --exclude={hosts[worst].host}",
        )
        closed = [way for way in closed if worst not in {way[0].node, way[1].node}]
    for one, other, why in closed[:_SHOWN]:
        back = "" if one.node in other.unreached else f" ({other.host} reaches {one.host})"
        yield problem("ways", f"{one.host} does not reach {other.host}{back}: {why}", fix)
    if len(closed) > _SHOWN:
        yield problem("ways", f"and {len(closed) - _SHOWN} more ways are closed", fix)


def judge_affinity(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether the ranks of a host have cores of their own, or enough to share."""
    by_node: dict[int, list[RankFacts]] = {}
    for one in ranks:
        by_node.setdefault(one.node, []).append(one)
    for mine in by_node.values():
        cores = {core for one in mine for core in one.cores}
        each = f"{min(len(one.cores) for one in mine)} cores a rank"
        if len(cores) < len(mine):
            yield problem(
                "affinity",
                f"{len(mine)} ranks of {mine[0].host} are bound to the same {len(cores)} core{'s' * (len(cores) > 1)} ({spans(sorted(cores))})",
                'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK", ask for --cpus-per-task, or srun --cpu-bind=none',
            )
            return
        if _overlap(mine):
            yield problem(
                "affinity",
                f"ranks of {mine[0].host} are bound to cores of each other: {'; '.join(spans(one.cores) for one in mine[:4])}",
                "srun --cpu-bind=cores, with --cpus-per-task",
            )
            return
    shared = any(len({one.cores for one in mine}) < len(mine) for mine in by_node.values())
    yield passed(
        "affinity", f"{each}, {'shared by the ranks of a host' if shared else 'of its own'}"
    )


def _overlap(ranks: Sequence[RankFacts]) -> bool:
    """Return whether sets of cores overlap that are not the same."""
    sets = [set(cores) for cores in {one.cores for one in ranks}]
    return sum(map(len, sets)) > len(set[int]().union(*sets))


@dataclass(frozen=True)
class AllocationRequest:
    """What Slurm was asked for; 0: it was left to Slurm."""

    job: str
    nodes: int = 0
    tasks: int = 0
    tasks_on: tuple[int, ...] = ()
    """Each node."""
    cpus_per_task: int = 0
    gpus_per_node: int = 0


def judge_request(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether what Slurm was asked for is there."""
    yield _judge_tasks(request)
    yield from _judge_cpus(request, ranks)
    yield from _judge_gpus(request, ranks)


def _judge_tasks(request: AllocationRequest) -> Finding:
    said = f"job {request.job}: {request.nodes} nodes, tasks {','.join(map(str, request.tasks_on)) or 'not said'}"
    if len(set(request.tasks_on)) > 1:
        return problem(
            "slurm tasks",
            f"{said}: not the same number on each node",
            "give --ntasks-per-node instead of --ntasks",
        )
    if (
        request.gpus_per_node
        and request.tasks_on
        and 1 < request.tasks_on[0] != request.gpus_per_node
    ):
        return problem(
            "slurm tasks",
            f"{said}, but {request.gpus_per_node} GPUs on each: one rank a GPU was meant?",
            f"--ntasks-per-node={request.gpus_per_node}",
        )
    return passed("slurm tasks", said)


def _judge_cpus(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    short = [one for one in ranks if len(one.cores) < request.cpus_per_task]
    if short:
        one = min(short, key=lambda rank: len(rank.cores))
        yield problem(
            "slurm cpus",
            f"{request.cpus_per_task} cores a task were asked for, rank {one.rank} on {one.host} has {len(one.cores)} ({spans(one.cores)})",
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" (Slurm 22.05 and later), or ask for no more than a node has',
        )
    elif request.cpus_per_task:
        yield passed("slurm cpus", f"{request.cpus_per_task} cores a task, as asked for")


def _judge_gpus(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    asked = [one for one in ranks if one.gpus_seen >= 0]
    lost = [one for one in asked if one.gpus_seen < _given(request, one)]
    strange = [one for one in asked if one.gpus_seen and not _given(request, one)]
    if lost:
        one = lost[0]
        yield problem(
            "slurm gpus",
            f"Slurm gave {_given(request, one)} GPUs on {_some([rank.host for rank in lost])}, and {one.gpus_seen} are seen there (CUDA_VISIBLE_DEVICES={one.visible or 'not set'})",
            f"see `nvidia-smi` there; leave them out: --exclude={','.join(rank.host for rank in lost[:_SHOWN])}",
        )
    elif strange:
        yield problem(
            "slurm gpus",
            f"{strange[0].gpus_seen} GPUs are seen on {_some([rank.host for rank in strange])}, and none was asked for",
            "ask for them, or others may get them too: --gpus-per-node, or --gres=gpu:N",
        )
    elif asked and request.gpus_per_node:
        yield passed("slurm gpus", f"{request.gpus_per_node} on each node, as asked for")


def _given(request: AllocationRequest, one: RankFacts) -> int:
    """Return how many GPUs Slurm says that a rank has: of its own, where each task sees only those, else of its node."""
    own = len([word for word in one.visible.split(",") if word])
    node = one.gpus_given or request.gpus_per_node
    return min(own, node) if own and node else node
