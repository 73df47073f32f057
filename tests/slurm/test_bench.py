"""Does `paceline bench` find the rate and the delay of a link that was shaped to known ones?"""

from __future__ import annotations

import pytest
from slurm.cluster.relay import bytes_per_second
from slurm.shaped import MESSAGES_OF_ALL_REDUCE, bench_between

WITHIN = 0.10
RATE, DELAY_MS = "20mbit", 50


@pytest.mark.slow
@pytest.mark.namespaces(nodes=2, rate=RATE, delay_ms=DELAY_MS)
def test_rate_and_delay_of_a_link_are_found(hosts):
    # No claim about this machine's speed: the link is so slow that how busy the machine is hardly shows.
    seen = bench_between(hosts, "1KiB,64KiB,384KiB", seconds=0)
    assert seen.right
    assert seen.bus_bytes_per_s == pytest.approx(bytes_per_second(RATE), rel=WITHIN)
    assert seen.pair_bytes_per_s == pytest.approx(bytes_per_second(RATE), rel=WITHIN)
    assert seen.pair_latency_s == pytest.approx(DELAY_MS / 1e3, rel=WITHIN)
    assert seen.all_reduce_latency_s == pytest.approx(MESSAGES_OF_ALL_REDUCE * DELAY_MS / 1e3, rel=WITHIN)
