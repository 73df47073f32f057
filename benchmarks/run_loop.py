"""What a small step costs: in a loop over `paceline.Run`, with `paceline.Trainer`, and in a plain torch loop.

    python benchmarks/run_loop.py [--rounds 7] [--ranks 1] [--width 64] [--device cpu]

All three train the same small model with AdamW on the same samples, four micro-batches of 16 samples per step, in
processes of their own and in interleaved rounds. The torch loop uses DistributedDataParallel if there are several ranks;
it reports and saves nothing. The first epoch is left out. Printed: microseconds per step, and ratios with their spread
over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ratios import ratios, rotated, spread

KINDS = ("loop", "trainer", "torch")
_MARK = "MICROSECONDS"

_SCRIPT = """
import os, sys, time, torch, paceline
import torch.distributed as dist
from contextlib import nullcontext
from torch.nn.functional import mse_loss

kind, width, device = sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv.pop(1)
EPOCHS, STEPS, LANES, SIZE = 4, 600, 4, 64
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def layers():
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS * SIZE, width, generator=generator), torch.randn(STEPS * SIZE, 1, generator=generator)

def with_run(times):
    config = paceline.config_from_argv()
    def sink(event):
        if type(event).__name__ == "EpochDone":
            times.append(time.perf_counter())
    with paceline.Run(config, sinks=[sink]) as run:
        model = run.model(layers())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        if kind == "trainer":
            paceline.Trainer(run, model, optimizer, samples(), mse_loss).fit()
            return
        def loss(batch):
            inputs, target = batch
            return mse_loss(model(inputs), target)
        for step in run.steps(samples()):
            run.update(optimizer, loss, step)

def with_torch(times):
    torch.set_num_threads(1)
    if RANKS > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    where = torch.device(device) if device == "cpu" else torch.device(device, RANK)
    model = layers().to(where)
    if RANKS > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = (part.to(where) for part in samples())
    generator, each = torch.Generator().manual_seed(0), LANES // RANKS
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs), generator=generator).split(SIZE):
            optimizer.zero_grad()
            lanes = batch.tensor_split(LANES)[RANK * each : (RANK + 1) * each]
            for number, rows in enumerate(lanes, start=1):
                rows = rows.to(where)
                with model.no_sync() if number < each and RANKS > 1 else nullcontext():
                    (mse_loss(model(inputs[rows]), targets[rows]) / each).backward()
            optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    if RANKS > 1:
        dist.destroy_process_group()

times = []
with_torch(times) if kind == "torch" else with_run(times)
if RANK == 0:
    print("MICROSECONDS", 1e6 * (times[-1] - times[0]) / (STEPS * (EPOCHS - 1)))
"""


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--ranks", type=int, default=1, choices=[1, 2, 4])
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        for number in range(given.rounds):
            for kind in rotated(KINDS, number):
                found[kind].append(_measure(script, kind, given))
    for kind, times in found.items():
        print(f"{kind:8} {statistics.median(times):8.0f} us per step")
    for over, under in (("trainer", "loop"), ("loop", "torch"), ("trainer", "torch")):
        ratio = spread(ratios(found[over], found[under]), 3)
        print(f"{over} / {under}, {given.ranks} ranks: {ratio}")


def _measure(script: Path, kind: str, given: argparse.Namespace) -> float:
    settings = [f"name={kind}", "resume=never", "epochs=4", "checkpoint.every=end"]
    settings += [f"device={given.device}", "capture=false"]
    settings += ["batch.global_size=64", "batch.lanes=4"]
    command = [sys.executable, "-m", "paceline", "run", "-n", str(given.ranks), str(script)]
    done = subprocess.run(
        [*command, kind, str(given.width), given.device, *settings],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(done.stdout.partition(_MARK)[2].split()[0])


if __name__ == "__main__":
    main()
