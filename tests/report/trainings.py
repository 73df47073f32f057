"""Runs as long trainings would have left them, for the page that shows them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

from paceline.config import RunConfig, config_from_words
from paceline.config.values import to_toml
from paceline.events import (
    CheckpointSaved,
    EpochDone,
    Event,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    StepDone,
    as_json,
)
from paceline.rundir import RunDir, make_private
from paceline.world.heartbeat import Beat

BEGUN_S = 1_790_000_000.0


def make_training(
    root: Path, *words: str, ranks: int = 8, seed: int = 1, metrics: tuple[str, ...] = ("eval_loss", "acc")
) -> RunDir:
    """Write the files of a run of 6,000 steps that failed once, was stopped once, and ended."""
    folder, dice = RunDir(make_private(root)), random.Random(seed)
    config = config_from_words(RunConfig, [*words])
    folder.config.write_text(to_toml(config))
    with folder.events.open("w") as file:
        for event in _course(dice, ranks, metrics):
            file.write(as_json(event) + "\n")
    make_private(folder.beat(0).parent)
    for rank in range(ranks):
        own_s = 0.031 * (1.9 if rank == 5 else 1 + dice.random() / 20)
        beat = Beat(rank, f"node{rank // 4}", 6000, BEGUN_S + 1e6, own_s, own_s * (0.5 if rank == 5 else 0.08))
        folder.beat(rank).write_text(json.dumps(asdict(beat)))
    versions = {"paceline": "0.1", "python": "3.11.7", "torch": "2.13.0"}
    variables = {"OMP_NUM_THREADS": "1", "NCCL_API_KEY": "hush-hush"}
    folder.environment.write_text(json.dumps({"versions": versions, "machine": {"cores": 64}, "variables": variables}))
    return folder


def _course(dice: random.Random, ranks: int, metrics: tuple[str, ...]) -> list[Event]:
    found: list[Event] = []
    when = BEGUN_S
    for first, last, ending in ((0, 2300, "failed"), (2000, 4000, "stopped"), (4000, 6000, "ended")):
        found.append(
            RunStarted(ranks, "cuda", "slurm", 60000, 256, max(8, ranks), 0.1, 6000, "a\nb", first, time_s=when)
        )
        for step in range(first + 10, last + 1, 10):
            rate = 256 / (0.055 * (1 + dice.gammavariate(1.2, 0.06)))
            when += 10 * 256 / rate
            loss = 2.3 * math.exp(-step / 1500) + 0.08 + dice.gauss(0, 0.03) * math.exp(-step / 4000)
            found.append(StepDone(step, 1 + step // 500, step * 256, loss, _lr(step), rate, time_s=when))
            if step % 500 == 0:
                found.append(_epoch(step, loss, rate, dice, metrics, when))
                found.append(CheckpointSaved(step, "there", 14_401_560, 0.021, 0.4, time_s=when))
        when += 40
        end = {"failed": RunFailed(last, 0, "RuntimeError: CUDA error: an illegal memory access", time_s=when - 39),
               "stopped": RunStopped(last, "the time limit of the job", time_s=when - 39),
               "ended": RunEnded(last, 300.0, "ab12cd34" * 8, time_s=when - 39)}  # fmt: skip
        found.append(end[ending])
    return found


def _epoch(
    step: int, loss: float, rate: float, dice: random.Random, metrics: tuple[str, ...], when: float
) -> EpochDone:
    quality = {name: 0.99 - 0.6 * math.exp(-step / 900) + dice.gauss(0, 0.004) for name in metrics}
    if "eval_loss" in quality:
        quality["eval_loss"] = loss + 0.06
    return EpochDone(step // 500, 12, step, loss, rate, quality, time_s=when)


def _lr(step: int) -> float:
    return 0.1 * min(1.0, step / 600) * 0.5 * (1 + math.cos(math.pi * step / 6000))


SCALING = {"mode": "strong", "points": [
    {"ranks": n, "step_s": 0.4 / n ** 0.93, "samples_per_s": 640 * n ** 0.93, "speedup": n ** 0.93, "efficiency": n ** -0.07,
     "exposed_share": 0.02 * n ** 0.5, "data_share": 0.01} for n in (1, 2, 4, 8)]}  # fmt: skip

VERDICT = {
    "summary": "The largest cause is exposed communication: gradients of the last layers are waited for.",
    "shares": {"compute": 0.61, "exposed communication": 0.19, "data wait": 0.08, "optimizer": 0.07, "host gaps": 0.05},
    "causes": [{"name": "exposed communication", "share": 0.19, "try": "larger buckets, or bf16 compression with exact=false"},
               {"name": "data wait", "share": 0.08, "try": "read.ahead=16"}],
}  # fmt: skip
