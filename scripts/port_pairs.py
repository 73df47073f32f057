"""How often do two jobs that start at the same moment on the same nodes get in each other's way? `port_pairs.py [PAIRS]`.

It starts a private Slurm of two nodes. The jobs of a pair belong to one run, have a rank on each node, and all four
ranks wait for each other before they meet, so that both jobs look for a port at the same moment. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.private_cluster import PrivateCluster, private_cluster, wanted

JOB_WITHIN_S = 300
RANK = """
import os, sys, time
from pathlib import Path
import torch, paceline
from paceline.world.collectives import sum_across
from paceline.world.process_group import join
Path(f"ready-{sys.argv[1]}-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_PROCID']}").touch()
while len(list(Path().glob(f"ready-{sys.argv[1]}-*"))) < 4:
    time.sleep(0.001)
begun = time.monotonic()
with join(paceline.RunConfig(name="pair")) as world:
    met_s = time.monotonic() - begun
    total = sum_across(world, torch.tensor(world.rank + 1.0)).item()
os.write(1, f"met {total} {world.size} {met_s:.3f}\\n".encode())
"""


def main() -> int:
    """Run the pairs; return 1 if any clashed."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    clashes, times_s = 0, []
    with (
        private_cluster(wanted(nodes=2, cpus=4, gpus=0)) as slurm,
        tempfile.TemporaryDirectory() as folder,
    ):
        (Path(folder) / "rank.py").write_text(RANK)
        for pair in range(pairs):
            said = [
                line for text in run_pair(slurm, Path(folder), pair) for line in text.splitlines()
            ]
            met = [line.split() for line in said if line.startswith("met 3.0 2 ")]
            times_s += [float(words[3]) for words in met]
            if len(met) != 4:
                clashes += 1
                print(f"pair {pair}:", *said, sep="\n  ", flush=True)
    times_s.sort()
    middle_s, most_s = (times_s[len(times_s) // 2], times_s[-1]) if times_s else (0.0, 0.0)
    print(
        f"{pairs} pairs, {clashes} clashed; ranks met within {middle_s:.2f} s (median), {most_s:.2f} s at most"
    )
    return 1 if clashes else 0


def run_pair(slurm: PrivateCluster, folder: Path, pair: int) -> list[str]:
    """Start two jobs, and return what each has said."""
    begun = time.monotonic()
    command = f"srun {sys.executable} rank.py {pair}"
    words = ("-N2", "-n2", "--output", str(folder / "%j.out"), "--wrap", command)
    jobs = [slurm.sbatch(*words, folder=folder) for _ in range(2)]
    states = [slurm.wait(job, JOB_WITHIN_S)["JobState"] for job in jobs]
    print(f"pair {pair}: {' '.join(states)} in {time.monotonic() - begun:.1f} s", flush=True)
    return [(folder / f"{job}.out").read_text() for job in jobs]


if __name__ == "__main__":
    sys.exit(main())
