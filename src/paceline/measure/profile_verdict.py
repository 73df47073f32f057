"""The verdict of a profile: the largest causes of the step time, and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.measure.profile_shares import KINDS, Shares
from paceline.telemetry.stragglers import Straggler, describe_straggler
from paceline.units import short_time

_MOST_CAUSES = 3
_WORTH = 0.03  # of a step; smaller causes are ignored

CAUSES: Mapping[str, tuple[str, str]] = {
    "compute": (
        "compute (forward and backward)",
        "precision=bf16, compile=true or capture=auto on a GPU, more threads= on a CPU, or more ranks",
    ),
    "exposed_communication": (
        "exposed communication",
        (
            "more samples per step (batch.global_size), fewer bytes (exact=false compression=bf16), fewer synchronizations (local_sgd.steps), "
            "or a faster network interface (PACELINE_INTERFACE)"
        ),
    ),
    "data_wait": (
        "waiting for samples",
        (
            "pack the dataset into shards (`paceline data pack`), prefetch more steps (read.prefetch_steps), use reader processes (read.workers), "
            "or cache shards on a local disk (read.cache); `paceline data bench` measures reading alone"
        ),
    ),
    "optimizer": (
        "the optimizer",
        "on a GPU compile=true, or fused=True in torch's optimizer without it; parallel=fsdp to shard its work; larger batches",
    ),
    "host_gaps": (
        "gaps on the host (Python, garbage collection, logs)",
        (
            "compile=true, or capture=auto on a GPU; larger lanes (fewer batch.lanes); a higher log.every_steps; no .item() or print in the model; "
            "gc.freeze() after the start"
        ),
    ),
    "waiting_for_slowest": (
        "ranks wait for the slowest one",
        "check that rank's node, its disk, other processes there, and whether its samples are larger",
    ),
}


@dataclass(frozen=True)
class ProfileVerdict:
    """Where a step's time goes on the decisive rank, for which the others wait."""

    script: str
    ranks: int
    device: str
    steps: int
    decisive_rank: int
    shares: Shares
    waiting_s: float
    """Seconds per step in which the other ranks wait for the decisive one, on average."""
    per_rank: tuple[Shares, ...]
    slow: Straggler | None

    @property
    def causes(self) -> list[str]:
        """The kinds of time that take most of the step, largest first."""
        seconds = asdict(self.shares)
        worth = [kind for kind in KINDS if seconds[kind] > _WORTH * self.shares.step_s]
        return sorted(worth, key=lambda kind: -seconds[kind])[:_MOST_CAUSES]


def judge(
    script: str, device: str, steps: int, per_rank: Sequence[Shares], slow: Straggler | None
) -> ProfileVerdict:
    """Return the verdict from the shares of all ranks.

    >>> fast = Shares(compute=0.01, exposed_communication=0.05, data_wait=0.0, optimizer=0.0, host_gaps=0.0)
    >>> late = Shares(compute=0.01, exposed_communication=0.01, data_wait=0.04, optimizer=0.0, host_gaps=0.0)
    >>> verdict = judge("x.py", "cpu", 5, [fast, late], None)
    >>> verdict.decisive_rank, verdict.causes, round(verdict.waiting_s, 3)
    (1, ['data_wait', 'compute', 'exposed_communication'], 0.04)
    """
    waits = [shares.exposed_communication for shares in per_rank]
    decisive = waits.index(min(waits))
    longer = [wait - waits[decisive] for rank, wait in enumerate(waits) if rank != decisive]
    waiting = sum(longer) / len(longer) if longer else 0.0
    return ProfileVerdict(
        script,
        len(per_rank),
        device,
        steps,
        decisive,
        per_rank[decisive],
        waiting,
        tuple(per_rank),
        slow,
    )


def as_dict(verdict: ProfileVerdict) -> dict[str, Any]:
    """Return the verdict with the keys of docs/profile.md."""
    step_s, seconds = verdict.shares.step_s, asdict(verdict.shares)
    slow = verdict.slow
    return {
        "script": verdict.script,
        "ranks": verdict.ranks,
        "device": verdict.device,
        "steps": verdict.steps,
        "step_s": step_s,
        "decisive_rank": verdict.decisive_rank,
        "seconds": seconds,
        "shares": {kind: value / step_s if step_s else 0.0 for kind, value in seconds.items()},
        "waiting_for_slowest_s": verdict.waiting_s,
        "per_rank": [asdict(shares) for shares in verdict.per_rank],
        "slow_rank": slow
        and {
            "rank": slow.beat.rank,
            "phase": slow.phase,
            "more_s": slow.more_s,
            "times": slow.times,
        },
        "causes": [
            {
                "cause": kind,
                "seconds": seconds[kind],
                "what": CAUSES[kind][0],
                "try": CAUSES[kind][1],
            }
            for kind in verdict.causes
        ],
        "sentences": sentences(verdict),
        "words": describe(verdict),
    }


def sentences(verdict: ProfileVerdict) -> list[str]:
    """Return one sentence on the step time, and one on a straggler if there is any."""
    step_s = verdict.shares.step_s
    ranks = f"{verdict.ranks} rank{'' if verdict.ranks == 1 else 's'}"
    where = f" (rank {verdict.decisive_rank}, which waits least)" if verdict.ranks > 1 else ""
    lines = [
        f"{verdict.script}, {ranks} on {verdict.device}: {short_time(step_s)} per step over {verdict.steps} steps{where}"
    ]
    if verdict.slow is not None:
        lines.append(describe_straggler(verdict.slow))
    if verdict.waiting_s > _WORTH * step_s:
        what, advice = CAUSES["waiting_for_slowest"]
        lines.append(f"{what}: {short_time(verdict.waiting_s)} per step. Try: {advice}")
    return lines


def describe(verdict: ProfileVerdict) -> str:
    """Return the verdict as text: the kinds of time, and what to try."""
    step_s, seconds = verdict.shares.step_s, asdict(verdict.shares)
    head, *more = sentences(verdict)
    lines = [head]
    for kind in KINDS:
        share = seconds[kind] / step_s if step_s else 0.0
        lines.append(
            f"  {kind.replace('_', ' '):<22} {short_time(seconds[kind]):>10}  {share:6.1%}"
        )
    lines += more
    for number, kind in enumerate(verdict.causes, 1):
        what, advice = CAUSES[kind]
        lines.append(f"{number}. {what}: {short_time(seconds[kind])} per step. Try: {advice}")
    return "\n".join(lines)
