"""What do those cost who look on at a training: watchdog, heartbeat, phases, and torch's flight recorder?

`python benchmarks/observers.py [--rounds 5] [--steps 1500]`. First their calls alone, a step each, by CPU time of the thread
that trains, and a collective of one rank with the recorder and without. Then a small exact training on two ranks (two layers, 4 lanes of 8 samples), in turns: with all, without the
watchdog, without the recorder. CPU is that of a whole rank, its threads included; both are the least of the rounds, for
what else the machine does only ever adds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import paceline
from paceline.exact.row import StepEngine
from paceline.hang.flight_recorder import last_collectives
from paceline.telemetry.phases import PhaseClock
from paceline.telemetry.pulse import Pulse
from paceline.train.observers.observers import Observers
from paceline.world.world import World

RANKS, WARM = 2, 100
OFF = {"TORCH_FR_BUFFER_SIZE": "0"}
WAYS = {
    "all": ({}, []),
    "without the watchdog": ({}, ["timeout.hang_steps=0"]),
    "without the recorder": (OFF, []),
}
PHASES_OF_A_STEP = ("forward", "backward", "forward", "backward", "wait", "optimizer", "other")


def main() -> int:
    """Measure, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    known = parser.parse_args()
    pulse_us, onlookers_us = 1e6 * pulse_s(), 1e6 * onlookers_s()
    print(
        f"calls alone: pulse {pulse_us:.2f} us a step, all onlookers {onlookers_us:.2f} us a step"
    )
    print(f"their threads: {threads_share():.3%} of a core")
    recorder_us = collective_us(recorded=True) - collective_us(recorded=False)
    print(f"the recorder: {recorder_us:.2f} us a collective")
    if not known.rounds:
        return 0
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(known.rounds):
        for way in [*WAYS][:: 1 if number % 2 else -1]:
            seen[way].append(trained(way, known.steps))
            print(number, way, seen[way][-1], flush=True)
    least = {
        way: {key: min(one[key] for one in found) for key in ("cpu_us", "wall_us")}
        for way, found in seen.items()
    }
    whole = least["all"]
    print(f"a step: {whole['cpu_us']:.0f} us of CPU a rank, {whole['wall_us']:.0f} us of time")
    shares = {
        "pulse": pulse_us,
        "all onlookers": onlookers_us,
        "the recorder, one collective": recorder_us,
    }
    print(
        "of that CPU:",
        ", ".join(f"{what} {us / whole['cpu_us']:.2%}" for what, us in shares.items()),
    )
    for way, found in least.items():
        print(
            f"{way}: CPU {found['cpu_us'] / whole['cpu_us'] - 1:+.1%}, time {found['wall_us'] / whole['wall_us'] - 1:+.1%}"
        )
    return 0


def pulse_s(steps: int = 50_000) -> float:
    """Return what the signs of life of a step cost."""
    pulse = Pulse(3.0)
    begun = time.thread_time()
    for step in pulse.reading(range(steps)):
        pulse.step_done(step)
        pulse.begin("saving", 1.0)
    return (time.thread_time() - begun) / steps


@contextlib.contextmanager
def looking_on() -> Iterator[tuple[Observers, Any]]:
    """Have all onlookers there as in a training, with their threads, but nothing to look at."""
    with tempfile.TemporaryDirectory() as name:
        take = SimpleNamespace(clock=PhaseClock(), ready=0.0)
        config = paceline.RunConfig(name="cost", runs=name)
        onlookers = Observers(World(), config, cast("StepEngine", take), lambda _: None)
        with onlookers.attending(1000):
            yield onlookers, take


def onlookers_s(steps: int = 20_000) -> float:
    """Return what all calls of a step cost."""
    with looking_on() as (onlookers, take):
        begun = time.thread_time()
        for step in onlookers.reading(range(steps)):
            for phase in PHASES_OF_A_STEP:
                take.clock.enter(phase)
            take.ready = time.perf_counter()
            onlookers.step_taken(32)
            onlookers.step_done(step + 1)
            onlookers.seen_enough()
        return (time.thread_time() - begun) / steps


def threads_share(seconds: float = 5.0, step_s: float = 0.01) -> float:
    """Return which share of a core their threads take while steps of 10 ms are done."""
    with looking_on() as (onlookers, take):
        begun, mine = time.process_time(), time.thread_time()
        for step in onlookers.reading(range(int(seconds / step_s))):
            time.sleep(step_s)
            take.ready = time.perf_counter()
            onlookers.step_done(step + 1)
        return (time.process_time() - begun - (time.thread_time() - mine)) / seconds


def collective_us(*, recorded: bool) -> float:
    """Return the CPU time of a collective of one rank alone: the least of some processes, and of some rounds in each."""
    env = os.environ | {"COST_ALONE": "1"} | ({} if recorded else OFF)
    outs = [
        subprocess.run(
            [sys.executable, __file__], env=env, capture_output=True, text=True, check=True
        )
        for _ in range(3)
    ]
    return min(float(done.stdout) for done in outs)


def collectives_alone(count: int = 2000) -> float:
    """Return the CPU microseconds of a collective, in a group of this process alone."""
    with tempfile.TemporaryDirectory() as name:
        store = torch.distributed.FileStore(f"{name}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mine, all_of_it = torch.zeros(424, dtype=torch.uint8), torch.zeros(424, dtype=torch.uint8)
        least = min(_round_s(mine, all_of_it, count) for _ in range(5))
        torch.distributed.destroy_process_group()
    return 1e6 * least / count


def _round_s(mine: Tensor, all_of_it: Tensor, count: int) -> float:
    begun = time.process_time()
    for _ in range(count):
        torch.distributed.all_gather_into_tensor(all_of_it, mine)
    return time.process_time() - begun


def trained(way: str, steps: int) -> dict[str, float]:
    """Train on two ranks in processes of their own; return what a step took on the first."""
    env, words = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "seen.json"
        sizes = [
            f"epochs={steps // 64}",
            "batch.global_size=32",
            "log.every_steps=100",
            "checkpoint.every=end",
        ]
        own = {"COST_STEPS": str(steps // 64 * 64), "COST_OUT": str(out)}
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "-n",
            str(RANKS),
            "--max-restarts",
            "0",
            __file__,
        ]
        done = subprocess.run(
            [*command, *sizes, *words],
            cwd=name,
            env=os.environ | own | env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, float] = json.loads(out.read_text())
    assert bool(found.pop("recorded")) == (env != OFF), "the recorder is not as it was asked for"
    return found


class Timed:
    """A loss that takes the time, from the first step that counts to the last."""

    def __init__(self, calls: int, warm: int) -> None:
        self._calls, self._warm, self._seen = calls, warm, 0
        self.cpu_s = self.wall_s = 0.0

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        self._seen += 1
        if self._seen in {self._warm, self._calls}:
            sign = 1 if self._seen == self._calls else -1
            self.cpu_s += sign * time.process_time()
            self.wall_s += sign * time.perf_counter()
        return mse_loss(outputs, target)


def train(config: paceline.RunConfig) -> None:
    """Be the training."""
    steps = int(os.environ["COST_STEPS"])
    with paceline.Run(config) as run:
        lanes = 4 // run.world.size
        net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        model = run.model(net)
        inputs = torch.arange(2048.0 * 16).reshape(2048, 16) / 32768
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        loss = Timed(steps * lanes, WARM * lanes)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        paceline.Trainer(run, model, optimizer, data, loss).fit()
        if run.is_main:
            measured: dict[str, Any] = {"recorded": len(last_collectives())}
            measured |= {
                "cpu_us": 1e6 * loss.cpu_s / (steps - WARM),
                "wall_us": 1e6 * loss.wall_s / (steps - WARM),
            }
            Path(os.environ["COST_OUT"]).write_text(json.dumps(measured))


if __name__ == "__main__":
    if "COST_OUT" in os.environ:
        train(paceline.config_from_argv())
    elif "COST_ALONE" in os.environ:
        print(collectives_alone())
    else:
        sys.exit(main())
