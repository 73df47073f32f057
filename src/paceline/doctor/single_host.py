"""All that can be found out about this host by looking at it alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.doctor.disk import judge_disk, probe_disk
from paceline.doctor.finding import Finding
from paceline.doctor.gpu import judge_gpus, query_driver
from paceline.doctor.network import gather_network, judge_network
from paceline.doctor.resources import gather_resources, judge_resources
from paceline.doctor.software import TorchFacts, judge_python, judge_torch, judge_variables


def examine_host(
    env: Mapping[str, str],
    runs: Path,
    ranks: int,
    peers: tuple[str, ...] = (),
    *,
    alone: bool = True,
    torch: TorchFacts | None,
) -> list[Finding]:
    """Return what is found on this host, for so many ranks of it; without torch's own words, if it was not asked."""
    return [
        judge_python(tuple(sys.version_info[:3]), sys.executable),
        *(judge_torch(torch) if torch else ()),
        *judge_gpus(query_driver(), torch, env.get("CUDA_VISIBLE_DEVICES")),
        *judge_variables(env),
        *judge_resources(gather_resources(), ranks, env),
        *judge_network(gather_network(env, peers), env, alone=alone),
        judge_disk(probe_disk(runs)),
    ]
