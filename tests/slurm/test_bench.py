"""Does `paceline bench` find the rate and the delay of a link that was shaped to known ones?

No claim about this machine's speed: the links are so slow that how busy the machine is hardly shows, and only the fastest of
some rounds count. The rate is asked of tc's link: the relay's queue is shorter than what is under way at such a delay, so
packets are lost there.
"""

from __future__ import annotations

import pytest

from support.shaped_links import MESSAGES_OF_ALL_REDUCE, bench_between
from support.slurm_cluster.relay import bytes_per_second

WITHIN = 0.10
RATE, DELAY_MS = "50mbit", 50
SECONDS = 15
"""For some eight rounds of the one, four of the other."""


@pytest.mark.heavy  # measures for 15 s; tests/measure sees what it computes
@pytest.mark.slow
@pytest.mark.namespaces(nodes=2, rate=RATE)
def test_the_rate_of_a_link_is_found(hosts):
    seen = bench_between(hosts, "1KiB,2MiB", SECONDS, at_best=True)
    assert seen.right
    assert seen.bus_bytes_per_s == pytest.approx(bytes_per_second(RATE), rel=WITHIN)
    assert seen.largest_bytes_per_s == pytest.approx(bytes_per_second(RATE), rel=WITHIN)


@pytest.mark.heavy  # measures for 15 s; tests/measure sees what it computes
@pytest.mark.slow
@pytest.mark.namespaces(nodes=2, delay_ms=DELAY_MS)
def test_the_delay_of_a_link_is_found(hosts):
    seen = bench_between(hosts, "1KiB,4KiB", SECONDS, at_best=True)
    assert seen.right
    assert seen.pair_latency_s == pytest.approx(DELAY_MS / 1e3, rel=WITHIN)
    assert seen.all_reduce_latency_s == pytest.approx(
        MESSAGES_OF_ALL_REDUCE * DELAY_MS / 1e3, rel=WITHIN
    )
