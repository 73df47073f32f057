"""How near to the truth is `paceline bench` on links of known rate and delay? `shaped_links.py [--seconds 60] [--links 100mbit:10]`.

Two hosts in network namespaces, a rank on each. Rates alone are set by tc (tbf), with delays by a relay in user space.
Beside what bench says stands what a plain TCP connection says of the delay. Needs root.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.private_cluster import PrivateCluster, private_cluster, wanted
from support.shaped_links import MESSAGES_OF_ALL_REDUCE, Seen, bench_between
from support.slurm_cluster.relay import bytes_per_second

WITHIN = 0.10
_LARGEST_S = 0.5  # how long the largest message takes at the rate of the link, at least
_DELAYS = 100  # and in delays of the link: all-reduce begins after four of them
_PATIENCE_S = 900.0
LINKS = "100mbit:0,500mbit:0,1gbit:0,20mbit:5,100mbit:5,100mbit:10,100mbit:25,200mbit:10,20mbit:50"
SERVE = """
import socket
with socket.create_server(("n1", 29500)) as server:
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while said := peer.recv(64):
        peer.sendall(said)
"""
ASK = """
import socket, statistics, time
for _ in range(100):
    try:
        peer = socket.create_connection(("n1", 29500))
        break
    except OSError:
        time.sleep(0.1)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(30):
    begun = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(64)
    times.append(time.perf_counter() - begun)
print(statistics.median(times) / 2)
"""


@dataclass(frozen=True)
class Tried:
    """One link, and what was seen of it."""

    rate: str
    delay_ms: float
    plain_s: float
    """One way, by a plain TCP connection."""
    seen: Seen

    def deviations(self) -> dict[str, float]:
        """Return how far each figure that the link decides is from the truth, as a share of it.

        Without a delay tc's bucket fills up again while a message goes the other way: pair is faster than the rate. With
        one, gloo's all-reduce waits for word between its pieces, and is slower: that is gloo's, not the link's.
        """
        truth, delay_s = bytes_per_second(self.rate), self.delay_ms / 1e3
        if not self.delay_ms:
            found = {
                "bus, fit": self.seen.bus_bytes_per_s / truth,
                "bus, largest": self.seen.largest_bytes_per_s / truth,
            }
        else:
            found = {
                "pair, fit": self.seen.pair_bytes_per_s / truth,
                "latency, pair": self.seen.pair_latency_s / delay_s,
                "latency, all-reduce": self.seen.all_reduce_latency_s
                / MESSAGES_OF_ALL_REDUCE
                / delay_s,
            }
        return {name: share - 1 for name, share in found.items()}

    def line(self) -> str:
        """Return a row of a table."""
        figures = [f"{name} {share:+.1%}" for name, share in self.deviations().items()]
        if self.delay_ms:
            share = self.seen.bus_bytes_per_s / bytes_per_second(self.rate)
            figures.append(f"(all-reduce carries {share:.0%} of the rate)")
        plain = f"plain TCP {1e3 * self.plain_s:.2f} ms one way"
        return f"| {self.rate} | {self.delay_ms:g} ms | {plain} | " + " | ".join(figures) + " |"


def main() -> int:
    """Try all links; return 1 if a figure is off by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="how long each link is measured, at least"
    )
    parser.add_argument("--links", default=LINKS, help="RATE:DELAY_MS, with commas between")
    known = parser.parse_args()
    far, links = 0, [link.split(":") for link in known.links.split(",")]
    for rate, delay_ms in links:
        tried = try_link(rate, float(delay_ms), known.seconds)
        assert tried.seen.right
        print(tried.line(), flush=True)
        far += sum(abs(share) > WITHIN for share in tried.deviations().values())
    print(f"{len(links)} links, {far} figures off by more than {WITHIN:.0%}")
    return 1 if far else 0


def try_link(rate: str, delay_ms: float, seconds: float) -> Tried:
    """Measure one link."""
    largest = int(bytes_per_second(rate) * max(_LARGEST_S, _DELAYS * delay_ms / 1e3))
    sizes = ",".join(
        str(size) for size in (1024, 4096, 16384, 1 << 20, largest // 8, largest // 2, largest)
    )
    with private_cluster(wanted(nodes=2, slurm=False, rate=rate, delay_ms=delay_ms)) as hosts:
        return Tried(
            rate, delay_ms, plain_delay_s(hosts), bench_between(hosts, sizes, seconds, _PATIENCE_S)
        )


def plain_delay_s(hosts: PrivateCluster) -> float:
    """Return half the time of a byte to and fro."""
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(hosts.run, [sys.executable, "-c", SERVE], "n1")
        found = float(hosts.run([sys.executable, "-c", ASK], "n2").out)
        server.result()
    return found


if __name__ == "__main__":
    sys.exit(main())
