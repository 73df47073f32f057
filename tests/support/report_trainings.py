"""Runs as long trainings would have left them, for the page that shows them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, config_from_words
from paceline.config.values import to_toml
from paceline.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    SlowRank,
    StepDone,
    as_json,
)  # fmt: skip
from paceline.measure.efficiency import Scaling, Trial, sizes_of
from paceline.measure.profile_shares import Shares
from paceline.measure.profile_verdict import as_dict, judge
from paceline.measure.recorded_step_times import StepPace
from paceline.measure.scaling_store import write_studies
from paceline.rundir import VERDICT_FILE, RunDir, make_private, write_whole
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.phases import PHASES, PhaseTime
from paceline.telemetry.rank_times import RankTimes
from paceline.telemetry.stragglers import Straggler

BEGUN_S = 1_790_000_000.0


def make_training(
    root: Path,
    *words: str,
    ranks: int = 8,
    seed: int = 1,
    metrics: tuple[str, ...] = ("eval_loss", "acc"),
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
        data_s = own_s * (0.5 if rank == 5 else 0.08)
        rest = [(own_s - data_s) * part for part in (0.3, 0.55, 0.1, 0.01, 0.04)]
        parts = zip((*PHASES, "wait"), (data_s, *rest, 0.06 - own_s), strict=True)
        phases = {phase: PhaseTime(seconds, seconds, seconds, 9) for phase, seconds in parts}
        beat = Beat(rank, f"node{rank // 4}", 6000, BEGUN_S + 1e6, own_s, data_s, 0.02, 20, phases)
        folder.beat(rank).write_text(json.dumps(asdict(beat)))
    versions = {"paceline": "0.1", "python": "3.11.7", "torch": "2.13.0"}
    variables = {"OMP_NUM_THREADS": "1", "NCCL_API_KEY": "hush-hush"}
    facts = {"versions": versions, "machine": {"cores": 64}, "variables": variables}
    folder.environment.write_text(json.dumps(facts))
    return folder


def _course(dice: random.Random, ranks: int, metrics: tuple[str, ...]) -> list[Event]:
    found: list[Event] = []
    when = BEGUN_S
    for first, last, ending in (
        (0, 2300, "failed"),
        (2000, 4000, "stopped"),
        (4000, 6000, "ended"),
    ):
        plan = (60000, 256, max(8, ranks), 0.1, 6000, "a\nb", first)
        found.append(RunStarted(ranks, "cuda", "slurm", *plan, time_s=when))
        for step in range(first + 10, last + 1, 10):
            rate = 256 / (0.055 * (1 + dice.gammavariate(1.2, 0.06)))
            when += 10 * 256 / rate
            noise = dice.gauss(0, 0.03) * math.exp(-step / 4000)
            loss = 2.3 * math.exp(-step / 1500) + 0.08 + noise
            done = (step, 1 + step // 500, step * 256, loss, _lr(step), rate)
            found.append(StepDone(*done, time_s=when))
            if step % 500 == 250:
                found.append(Evaluated(step, _quality(step, loss, dice, metrics), time_s=when))
            if step == 5000:
                words = "rank 5 (node1) is slow: +12.4 ms per step waiting for samples (1.9 x the others)"
                slow = (step, 5, "node1", "data", "chronic", 0.0124, 1.9, words)
                found.append(SlowRank(*slow, time_s=when))
            if step % 500 == 0:
                quality = _quality(step, loss, dice, metrics)
                found.append(EpochDone(step // 500, 12, step, loss, rate, quality, time_s=when))
                found.append(CheckpointSaved(step, "there", 14_401_560, 0.021, 0.4, time_s=when))
        when += 40
        end = {"failed": RunFailed(last, 0, "RuntimeError: CUDA error: an illegal memory access", time_s=when - 39),
               "stopped": RunStopped(last, "the time limit of the job", time_s=when - 39),
               "ended": RunEnded(last, 300.0, "ab12cd34" * 8, time_s=when - 39)}  # fmt: skip
        found.append(end[ending])
    return found


def _quality(
    step: int, loss: float, dice: random.Random, metrics: tuple[str, ...]
) -> dict[str, float]:
    quality = {name: 0.99 - 0.6 * math.exp(-step / 900) + dice.gauss(0, 0.004) for name in metrics}
    if "eval_loss" in quality:
        quality["eval_loss"] = loss + 0.06
    return quality


def _lr(step: int) -> float:
    return 0.1 * min(1.0, step / 600) * 0.5 * (1 + math.cos(math.pi * step / 6000))


def a_study(said: str, kind: str, worlds: tuple[int, ...]) -> Scaling:
    """Return a study of three rounds with some spread."""
    trials = []
    for n in worlds:
        times = [0.4 / n**0.93 * noise for noise in (0.95, 1.0, 1.08 + n / 50)]
        paces = [StepPace(time_s, 256, 0.01, 0.02 * n**0.5, 0.01, 0.1) for time_s in times]
        trials.append(Trial(n, 8, "", paces))
    texts = ("host", "cpu", "system", "python", "gpu", "backend", "torch", "paceline")
    settings = ("exact", "parallel", "precision", "compile", "capture", "threads")
    facts: dict[str, Any] = dict.fromkeys((*texts, *settings), said)
    facts |= {"memory_bytes": 10**9, "cores": 8, "nodes": 1}
    words = (said, said, [said], kind, 10, 40, 3, "2026-01-01T00:00:00+00:00", facts)
    return Scaling(*words, sizes_of(trials))


def measure(folder: RunDir, said: str = "x.py") -> None:
    """Leave what `paceline scale` and `paceline profile` would, by their own writers."""
    write_studies(folder.scaling, {"strong": a_study(said, "strong", (1, 2, 4, 8))})
    ranks = [Shares(0.03, 0.004 * rank, 0.004, 0.0035, 0.002) for rank in range(1, 9)]
    slow = Straggler(Beat(5, said, 9, 0.0, 0.2, 0.1), 2.0, "data", "chronic", 0.1)
    verdict = judge(said, "cuda", 5, ranks, slow)
    write_whole(make_private(folder.profile) / VERDICT_FILE, json.dumps(as_dict(verdict)).encode())


def note_rank_times(folder: RunDir, ranks: int, slow: int, looks: int = 120) -> None:
    """Leave what rank 0 keeps of all ranks; one is slow in the second half."""
    kept, dice = RankTimes(folder.rank_times, ranks), random.Random(3)
    for look in range(1, looks + 1):
        times = [0.03 * (1 + dice.random() / 10) for _ in range(ranks)]
        times[slow] *= 1.8 if 2 * look > looks else 1
        kept.add([Beat(n, "n", 50 * look, 0.0, s, 0.0, steps=9) for n, s in enumerate(times)])
