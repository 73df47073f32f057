"""Whether the ranks fit together: versions, clocks, connectivity, cores, and Slurm's request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.doctor.finding import Finding, name_some, passed, problem
from paceline.doctor.rank_facts import RankFacts
from paceline.doctor.resources import spans
from paceline.units import short_time

_MAX_CLOCK_S = 1.0
_MAX_SHOWN = 6
_FIREWALL_FIX = (
    "open the firewall between them for all ports above 1023, "
    "or set PACELINE_INTERFACE to the interface that connects them"
)

_Failure = tuple[RankFacts, RankFacts, str]
"""A connection that failed: from, to, and why."""


def judge_missing_ranks(
    ranks: Sequence[RankFacts], size: int, errors: Sequence[tuple[str, str, str]]
) -> Finding:
    """Judge whether all ranks reported; `errors` are what others printed: host, problem, fix."""
    missing = sorted(set(range(size)) - {rank.rank for rank in ranks})
    if not missing:
        hosts = len({rank.node for rank in ranks})
        return passed("ranks", f"all {size} reported, from {hosts} hosts")
    text = f"rank{'s' * (len(missing) > 1)} {spans(missing)} of {size} did not report"
    if errors:
        host, why, fix = errors[0]
        return problem("ranks", f"{text}; error on {host}: {why}", fix)
    return problem(
        "ranks",
        text,
        "check the output of their hosts above; `sinfo -R` lists nodes that are down",
    )


def judge_versions(ranks: Sequence[RankFacts]) -> Finding:
    """Judge whether all ranks have the same Python and packages.

    >>> facts = []
    >>> for rank, torch in enumerate(["2.12", "2.13", "2.13"]):
    ...     facts.append(RankFacts(rank, f"n{rank}", rank, 0, {"torch": torch}, (0,)))
    >>> judge_versions(facts).says
    'torch differs: 2.12 on n0; 2.13 on n1, n2'
    """
    names = sorted({name for rank in ranks for name in rank.versions})
    for name in names:
        hosts_by_version: dict[str, list[str]] = {}
        for rank in ranks:
            version = rank.versions.get(name, "none")
            hosts_by_version.setdefault(version, []).append(rank.host)
        if len(hosts_by_version) > 1:
            found = [f"{version} on {_some(hosts)}" for version, hosts in hosts_by_version.items()]
            return problem(
                "versions",
                f"{name} differs: {'; '.join(found)}",
                "start all ranks from one environment, on a shared disk or packed: "
                "`paceline doctor --pack`",
            )
    same = ranks[0].versions
    shown = [f"{name} {same[name]}" for name in ("python", "torch", "paceline") if name in same]
    return passed("versions", f"{', '.join(shown)} on all ranks")


def _some(hosts: Sequence[str]) -> str:
    return name_some(list(dict.fromkeys(hosts)), _MAX_SHOWN)


def judge_clocks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge the difference of the hosts' clocks: at 15 s torchrun takes live nodes for dead."""
    hosts = [rank for rank in ranks if rank.local_rank == 0 and math.isfinite(rank.clock_error_s)]
    if len(hosts) < 2:
        return
    first = min(hosts, key=lambda host: host.clock_s)
    last = max(hosts, key=lambda host: host.clock_s)
    difference_s = last.clock_s - first.clock_s
    error_s = first.clock_error_s + last.clock_error_s
    if difference_s - error_s > _MAX_CLOCK_S:
        yield problem(
            "clocks",
            f"the clock of {last.host} is {difference_s:.1f} s ahead of {first.host}",
            f"start chrony or ntpd on both: `timedatectl status` on {first.host} and {last.host}",
        )
    else:
        yield passed("clocks", f"at most {short_time(difference_s + error_s)} apart")


def judge_connectivity(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether every host can connect to every other, in both directions, at free ports."""
    hosts = {rank.node: rank for rank in ranks if rank.local_rank == 0}
    if len(hosts) < 2:
        return
    failures: list[_Failure] = []
    for host in hosts.values():
        for node, why in host.unreached.items():
            if node in hosts:
                failures.append((host, hosts[node], why))
    if not failures:
        count = len(hosts)
        pairs = f"all {count * (count - 1)} connections between {count} hosts"
        yield passed("ways", f"{pairs} work, at any port")
        return
    isolated = _isolated_node(failures, len(hosts))
    if isolated is not None:
        related = [failure for failure in failures if _involves(failure, isolated)]
        failures = [failure for failure in failures if not _involves(failure, isolated)]
        name = hosts[isolated].host
        yield problem(
            "ways",
            f"no other host can reach {name}: {related[0][2]}",
            f"{_FIREWALL_FIX}; or exclude it: --exclude={name}",
        )
    for source, target, why in failures[:_MAX_SHOWN]:
        works = source.node not in target.unreached
        back = f" ({target.host} reaches {source.host})" if works else ""
        yield problem(
            "ways", f"{source.host} cannot reach {target.host}{back}: {why}", _FIREWALL_FIX
        )
    if len(failures) > _MAX_SHOWN:
        more = len(failures) - _MAX_SHOWN
        yield problem("ways", f"{more} more connections fail", _FIREWALL_FIX)


def _involves(failure: _Failure, node: int) -> bool:
    return node in {failure[0].node, failure[1].node}


def _isolated_node(failures: Sequence[_Failure], hosts: int) -> int | None:
    """Return the node whose connections fail in both directions to all others, if there is one."""
    count: Counter[int] = Counter()
    for source, target, _ in failures:
        count[source.node] += 1
        count[target.node] += 1
    node, failed = count.most_common(1)[0]
    return node if hosts > 2 and failed >= 2 * (hosts - 1) else None


def judge_affinity(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether the ranks of a host have cores of their own, or enough to share."""
    by_node: dict[int, list[RankFacts]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)
    shared = False
    for node_ranks in by_node.values():
        masks = {rank.cores for rank in node_ranks}
        cores = set[int]().union(*masks)
        host = node_ranks[0].host
        if len(cores) < len(node_ranks):
            plural = "s" * (len(cores) > 1)
            yield problem(
                "affinity",
                f"{len(node_ranks)} ranks of {host} are bound to the same "
                f"{len(cores)} core{plural} ({spans(sorted(cores))})",
                'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK", request --cpus-per-task, '
                "or use srun --cpu-bind=none",
            )
            return
        if sum(map(len, masks)) > len(cores):
            shown = "; ".join(spans(rank.cores) for rank in node_ranks[:4])
            yield problem(
                "affinity",
                f"ranks of {host} are bound to overlapping cores: {shown}",
                "use srun --cpu-bind=cores, with --cpus-per-task",
            )
            return
        shared |= len(masks) < len(node_ranks)
    fewest = min(len(rank.cores) for rank in node_ranks)
    how = "shared by the ranks of a host" if shared else "not shared"
    yield passed("affinity", f"{fewest} cores per rank, {how}")


@dataclass(frozen=True)
class AllocationRequest:
    """The resources that the Slurm job requested; 0: left to Slurm."""

    job: str
    nodes: int = 0
    tasks: int = 0
    tasks_on: tuple[int, ...] = ()
    """Tasks on each node."""
    cpus_per_task: int = 0
    gpus_per_node: int = 0


def judge_request(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Judge whether the ranks have the tasks, cores and GPUs that the job requested."""
    yield _judge_tasks(request)
    yield from _judge_cpus(request, ranks)
    yield from _judge_gpus(request, ranks)


def _judge_tasks(request: AllocationRequest) -> Finding:
    tasks = ",".join(map(str, request.tasks_on)) or "not set"
    text = f"job {request.job}: {request.nodes} nodes, tasks per node {tasks}"
    if len(set(request.tasks_on)) > 1:
        return problem(
            "slurm tasks",
            f"{text}: not the same number on each node",
            "use --ntasks-per-node instead of --ntasks",
        )
    gpus = request.gpus_per_node
    if gpus and request.tasks_on and 1 < request.tasks_on[0] != gpus:
        return problem(
            "slurm tasks",
            f"{text}, but {gpus} GPUs per node: use one rank per GPU",
            f"--ntasks-per-node={gpus}",
        )
    return passed("slurm tasks", text)


def _judge_cpus(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if not request.cpus_per_task:
        return
    rank = min(ranks, key=lambda rank: len(rank.cores))
    if len(rank.cores) < request.cpus_per_task:
        yield problem(
            "slurm cpus",
            f"requested {request.cpus_per_task} cores per task, "
            f"rank {rank.rank} on {rank.host} has {len(rank.cores)} ({spans(rank.cores)})",
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" (Slurm 22.05 and later), '
            "or request no more than a node has",
        )
    else:
        yield passed("slurm cpus", f"{request.cpus_per_task} cores per task, as requested")


def _judge_gpus(request: AllocationRequest, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    asked = [rank for rank in ranks if rank.gpus_seen >= 0]
    lost = [rank for rank in asked if rank.gpus_seen < _given(request, rank)]
    extra = [rank for rank in asked if rank.gpus_seen and not _given(request, rank)]
    if lost:
        hosts = [rank.host for rank in lost]
        visible = lost[0].visible or "not set"
        yield problem(
            "slurm gpus",
            f"Slurm allocated {_given(request, lost[0])} GPUs on {_some(hosts)}, "
            f"but {lost[0].gpus_seen} are visible (CUDA_VISIBLE_DEVICES={visible})",
            f"check `nvidia-smi` there; exclude them: --exclude={','.join(hosts[:_MAX_SHOWN])}",
        )
    elif extra:
        hosts = [rank.host for rank in extra]
        yield problem(
            "slurm gpus",
            f"{extra[0].gpus_seen} GPUs are visible on {_some(hosts)}, but the job requested none",
            "request them, or other jobs may get them too: --gpus-per-node, or --gres=gpu:N",
        )
    elif asked and request.gpus_per_node:
        yield passed("slurm gpus", f"{request.gpus_per_node} per node, as requested")


def _given(request: AllocationRequest, rank: RankFacts) -> int:
    """Return the GPUs that Slurm gave to a rank: its own, if tasks see only theirs, else its node's."""
    own = len([index for index in rank.visible.split(",") if index])
    node = rank.gpus_given or request.gpus_per_node
    return min(own, node) if own and node else node
