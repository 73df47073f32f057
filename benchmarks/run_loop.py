"""What a step costs in a loop over `paceline.Run`, relative to `paceline.Trainer` on the same work.

    python benchmarks/run_loop.py [--rounds 7] [--ranks 1] [--device cpu]

Both train the same small model on the same samples in processes of their own, in interleaved rounds. The first epoch is
left out. Printed: microseconds per step, and the ratio with its spread over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SCRIPT = """
import sys, time, torch, paceline
from torch.nn.functional import mse_loss

kind, width = sys.argv.pop(1), int(sys.argv.pop(1))
STEPS, SIZE = 600, 64

def layers():
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

def main(config):
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS * SIZE, width, generator=generator), torch.randn(STEPS * SIZE, 1, generator=generator)
    times = []
    def sink(event):
        if type(event).__name__ == "EpochDone":
            times.append(time.perf_counter())
    if kind == "trainer":
        with paceline.join(config) as world:
            model = paceline.parallelize(layers(), world, config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            batches = paceline.Batches(data, config, world)
            paceline.Trainer(world, model, optimizer, batches, mse_loss, config, sinks=[sink]).run()
    else:
        with paceline.Run(config, sinks=[sink]) as run:
            model = run.model(layers())
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
            for step in run.steps(data):
                run.update(optimizer, lambda batch: mse_loss(model(batch[0]), batch[1]), step)
    if times:
        print("MICROSECONDS", 1e6 * (times[-1] - times[0]) / (STEPS * (len(times) - 1)))

main(paceline.config_from_argv())
"""


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    found: dict[str, list[float]] = {"trainer": [], "run": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        for number in range(given.rounds):
            for kind in sorted(found, reverse=bool(number % 2)):
                found[kind].append(_measure(script, kind, given))
    ratios = [ours / theirs for ours, theirs in zip(found["run"], found["trainer"], strict=True)]
    for kind, times in found.items():
        print(f"{kind:8} {statistics.median(times):8.0f} us per step")
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"run / trainer, {given.ranks} ranks: {statistics.median(ratios):.3f} ({spread})")


def _measure(script: Path, kind: str, given: argparse.Namespace) -> float:
    settings = [f"name={kind}", "resume=never", "epochs=4", "checkpoint.every=end"]
    settings += [f"device={given.device}", "capture=false"]
    sizes = ["batch.global_size=64", "batch.lanes=4"]
    command = [sys.executable, "-m", "paceline", "run", "-n", str(given.ranks), str(script)]
    done = subprocess.run(
        [*command, kind, str(given.width), *settings, *sizes],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.partition("MICROSECONDS")[2].split()[0])


if __name__ == "__main__":
    main()
