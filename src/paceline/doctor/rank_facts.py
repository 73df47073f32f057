"""What one rank tells of itself, for all of them to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.doctor.finding import Finding, as_dict, from_dict


@dataclass(frozen=True)
class RankFacts:
    """A rank: where it is, what it runs, what it may use; one of each host also says what it found there."""

    rank: int
    host: str
    node: int
    local_rank: int
    versions: Mapping[str, str]
    cores: tuple[int, ...]
    gpus_seen: int = -1
    """By torch, or the driver; -1: nobody was asked."""
    gpus_given: int = 0
    """By Slurm, on this node."""
    visible: str = ""
    """CUDA_VISIBLE_DEVICES."""
    found: tuple[Finding, ...] = ()
    clock_s: float = 0.0
    """How far its clock is ahead of the one that asked."""
    clock_error_s: float = 0.0
    unreached: Mapping[int, str] = field(default_factory=dict)
    """The nodes that it could not reach, and why."""


def sent(facts: RankFacts) -> dict[str, Any]:
    """Return the facts as JSON has them."""
    return asdict(facts) | {"found": [as_dict(one) for one in facts.found]}


def received(said: Mapping[str, Any]) -> RankFacts:
    """Return the facts that a rank has sent, each made sure to be of its kind."""
    return RankFacts(
        rank=int(said["rank"]),
        host=str(said["host"])[:200],
        node=int(said["node"]),
        local_rank=int(said["local_rank"]),
        versions={str(name): str(value) for name, value in dict(said["versions"]).items()},
        cores=tuple(int(core) for core in said["cores"]),
        gpus_seen=int(said["gpus_seen"]),
        gpus_given=int(said["gpus_given"]),
        visible=str(said["visible"]),
        found=tuple(from_dict(one) for one in said["found"]),
    )
