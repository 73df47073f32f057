"""All checks that one host can do alone.

Its own file: the command line (for this host) and `rank` (for each of several) both run them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.doctor.compiled_code import judge_compiled_code
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
    """Return the findings for `ranks` ranks on this host; without `torch` its checks are skipped."""
    return [
        judge_python(tuple(sys.version_info[:3]), sys.executable),
        *(judge_torch(torch) if torch else ()),
        *judge_gpus(query_driver(), torch, env.get("CUDA_VISIBLE_DEVICES")),
        *judge_variables(env),
        *judge_resources(gather_resources(), ranks, env),
        *judge_network(gather_network(env, peers), env, alone=alone),
        judge_disk(probe_disk(runs)),
        judge_compiled_code(env),
    ]
