"""All that can be found out about this host by looking at it alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.doctor.disk import judge_disk, look_at_disk
from paceline.doctor.finding import Finding
from paceline.doctor.gpu import ask_driver, judge_gpus
from paceline.doctor.host import judge_host, look_at_host
from paceline.doctor.network import judge_network, look_at_network
from paceline.doctor.software import TorchFacts, judge_python, judge_settings, judge_torch


def examine_here(
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
        *judge_gpus(ask_driver(), torch, env.get("CUDA_VISIBLE_DEVICES")),
        *judge_settings(env),
        *judge_host(look_at_host(), ranks, env),
        *judge_network(look_at_network(env, peers), env, alone=alone),
        judge_disk(look_at_disk(runs)),
    ]
