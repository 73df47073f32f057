"""The facts that each rank reports, to be compared across ranks.

Its own file: the ranks send them, the collector receives them, `cross_host` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.doctor.finding import Finding, as_dict, from_dict


@dataclass(frozen=True)
class RankFacts:
    """Place, versions and resources of a rank; local rank 0 adds the findings on its host."""

    rank: int
    host: str
    node: int
    local_rank: int
    versions: Mapping[str, str]
    cores: tuple[int, ...]
    gpus_seen: int = -1
    """GPUs that torch, or the driver, sees; -1: not asked."""
    gpus_given: int = 0
    """GPUs that Slurm allocated on this node."""
    visible: str = ""
    """CUDA_VISIBLE_DEVICES."""
    findings: tuple[Finding, ...] = ()
    clock_s: float = 0.0
    """How far its clock is ahead of the collector's."""
    clock_error_s: float = 0.0
    unreached: Mapping[int, str] = field(default_factory=dict)
    """The nodes that it cannot reach, and why."""


def facts_as_dict(facts: RankFacts) -> dict[str, Any]:
    """Return the facts as JSON values."""
    return asdict(facts) | {"findings": [as_dict(finding) for finding in facts.findings]}


def facts_from_dict(values: Mapping[str, Any]) -> RankFacts:
    """Return the facts that a rank sent, each converted to its type."""
    return RankFacts(
        rank=int(values["rank"]),
        host=str(values["host"])[:200],
        node=int(values["node"]),
        local_rank=int(values["local_rank"]),
        versions={str(name): str(value) for name, value in dict(values["versions"]).items()},
        cores=tuple(int(core) for core in values["cores"]),
        gpus_seen=int(values["gpus_seen"]),
        gpus_given=int(values["gpus_given"]),
        visible=str(values["visible"]),
        findings=tuple(from_dict(finding) for finding in values["findings"]),
    )
