"""`paceline bench` on links of known rate and delay."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.measure.bench_fit import fit_line
from support.private_cluster import PrivateCluster

PACELINE = str(Path(sys.executable).with_name("paceline"))
MESSAGES_OF_ALL_REDUCE = 4
"""Sequential messages between two ranks: gloo sends each half of the ring only when the receiver is ready."""


@dataclass(frozen=True)
class Seen:
    """Measurements of bench on a link between two hosts."""

    right: bool
    bus_bytes_per_s: float
    """Of all-reduce, from the fit."""
    largest_bytes_per_s: float
    """Of all-reduce, at the largest message."""
    pair_bytes_per_s: float
    pair_latency_s: float
    all_reduce_latency_s: float


def bench_between(
    hosts: PrivateCluster,
    sizes: str,
    seconds: float,
    timeout_s: float = 240,
    *,
    at_best: bool = False,
) -> Seen:
    """Measure all-reduce and pair between a rank on each of two hosts; at_best: from the fastest rounds only."""

    def on(node: int) -> str:
        where = ["-n", "1", "--nodes", "2", "--node", str(node), "--rendezvous", "n1:29400"]
        what = ["--ops", "all-reduce,pair", "--sizes", sizes, "--device", "cpu", "--json"]
        what += ["--seconds", str(seconds)]
        done = hosts.run([PACELINE, "bench", *where, *what], f"n{node + 1}", timeout_s=timeout_s)
        assert done.code == 0, done.out + done.err
        return done.out

    with ThreadPoolExecutor(2) as both:
        said, nothing = both.map(on, range(2))
    assert not nothing
    found = json.loads(said)
    return seen_in(fastest_of(found) if at_best else found)


def fastest_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results as if every round had been the fastest: a busy machine delays some, and speeds up none."""
    return found | {"operations": [_fastest(each) for each in found["operations"]]}


def _fastest(operation: dict[str, Any]) -> dict[str, Any]:
    rows, factor = operation["sizes"], operation["bus_factor"]
    fit = fit_line([row["size_bytes"] for row in rows], [row["fastest_s"] for row in rows])
    assert fit
    rates = {"bytes_per_s": fit.bytes_per_s, "bus_bytes_per_s": fit.bytes_per_s * factor}
    sizes = [
        row | {"busbw_gb_per_s": factor * row["size_bytes"] / row["fastest_s"] / 1e9}
        for row in rows
    ]
    return operation | {"sizes": sizes, "fit": {"latency_s": fit.latency_s} | rates}


def seen_in(found: dict[str, Any]) -> Seen:
    """Return the measurements that depend on the link."""
    all_reduce, pair = found["operations"]
    return Seen(
        found["right"],
        all_reduce["fit"]["bus_bytes_per_s"] or 0.0,
        1e9 * all_reduce["sizes"][-1]["busbw_gb_per_s"],
        pair["fit"]["bytes_per_s"] or 0.0,
        pair["fit"]["latency_s"],
        all_reduce["fit"]["latency_s"],
    )
