"""Scaling studies: train at several world sizes, round after round, and compare the step times."""

from __future__ import annotations

import datetime
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.cluster.allocation import Allocation
from paceline.errors import ConfigError
from paceline.launch.failure import RunFailed
from paceline.launch.spec import Program
from paceline.measure.efficiency import Scaling, Trial, sizes_of
from paceline.measure.placement import isolated_settings, run_ranks
from paceline.measure.recorded_step_times import RecordedRun, StepPace, pace_of, read_run
from paceline.redact import without_logins
from paceline.version import VERSION

_FROM_RUN = (
    "host",
    "cpu",
    "memory_bytes",
    "system",
    "python",
    "gpu",
    "backend",
    "torch",
    "cores",
    "nodes",
)
_FROM_CONFIG = ("exact", "parallel", "precision", "compile", "capture", "threads")


@dataclass(frozen=True)
class Study:
    """A program, and how often to run it at which world sizes."""

    target: Program
    words: tuple[str, ...]
    worlds: tuple[int, ...]
    """Smallest first."""
    weak: bool
    rounds: int
    warmup: int
    steps: int
    allocation: Allocation | None = None
    progress: TextIO | None = None


@dataclass(frozen=True)
class Batch:
    """The global batch of a step, and its lanes."""

    global_size: int
    lanes: int


def run_study(study: Study) -> Scaling:
    """Run every world size once per round, every other round in reverse, so that drift affects all alike."""
    shared = study.allocation is not None and not study.allocation.is_local
    home = Path.cwd() if shared else None  # other nodes must see the files
    with tempfile.TemporaryDirectory(prefix=".paceline-scale-", dir=home) as folder:
        runs = _Runs(study, Path(folder))
        for number in range(study.rounds):
            for world in study.worlds if number % 2 == 0 else reversed(study.worlds):
                runs.add(world, number)
        return runs.result()


class _Runs:
    """The runs of a study so far."""

    def __init__(self, study: Study, folder: Path) -> None:
        self._study, self._folder = study, folder
        self._paces: dict[int, list[StepPace]] = {world: [] for world in study.worlds}
        self._last: dict[int, RecordedRun] = {}
        self._config: dict[str, Any] = {}
        self._batch: Batch | None = None

    def add(self, world: int, number: int) -> None:
        """Run one world size until it ends, and keep its step times."""
        study = self._study
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        self._say(f"round {number + 1} of {study.rounds}: {study.target.name} on {ranks} ...")
        home = self._folder / f"{number}-{world}"
        settings = self._settings(world, home)
        most = 0 if study.weak else study.worlds[-1]  # every size has lanes for the largest
        failure = run_ranks(study.target, world, study.words, settings, study.allocation, most)
        if failure is not None:
            raise RunFailed(study.target.name, world, failure)
        run = self._last[world] = read_run(home / "times", world, study.target.name)
        if self._batch is None:
            self._read_config(home)
        self._check(world, run)
        self._paces[world].append(pace_of(run, study.warmup))
        shutil.rmtree(home)

    def _settings(self, world: int, home: Path) -> dict[str, object]:
        settings: dict[str, object] = {
            "record.times": str(home / "times"),
            "steps": self._study.warmup + self._study.steps,
            **isolated_settings(home),
        }
        if self._study.weak and self._batch is not None:
            batch = self._batch_of(world)
            settings |= {"batch.global_size": batch.global_size, "batch.lanes": batch.lanes}
        return settings

    def _read_config(self, home: Path) -> None:
        """Take the batch from the config of the first run; reject worlds that cannot run it."""
        file = next(home.glob("runs/*/config.toml"))
        self._config = tomllib.loads(file.read_text(encoding="utf-8"))
        batch = self._batch = Batch(**self._config["batch"])
        largest = self._study.worlds[-1]
        if not self._study.weak and largest > batch.lanes:
            raise ConfigError(
                f"{largest} ranks cannot share the {batch.lanes} lanes of a step",
                fix=f"add batch.lanes={largest} (for all sizes), remove {largest} from --worlds, or use --weak",
            )
        for world in self._study.worlds:
            self._batch_of(world)

    def _batch_of(self, world: int) -> Batch:
        """Return the batch of a world: the same in all, or proportional to its size."""
        assert self._batch is not None
        if not self._study.weak:
            return self._batch
        first, batch = self._study.worlds[0], self._batch
        if batch.global_size * world % first or batch.lanes * world % first:
            raise ConfigError(
                f"the batch of {first} ranks cannot grow to {world} ranks in whole lanes",
                fix=f"give --worlds that are multiples of the smallest, such as {first},{2 * first},{4 * first}",
            )
        return Batch(batch.global_size * world // first, batch.lanes * world // first)

    def _check(self, world: int, run: RecordedRun) -> None:
        wanted = self._batch_of(world).global_size
        if run.most_samples < wanted:
            raise ConfigError(
                f"batch.global_size is {wanted:,} on {world} ranks, but the dataset has only {run.most_samples:,} samples",
                fix="give a smaller batch.global_size, or remove the large sizes from --worlds",
            )
        if len(run.steps) <= self._study.warmup:
            raise ConfigError(
                f"{self._study.target.name} took only {len(run.steps)} steps, the warm-up alone is {self._study.warmup}",
                fix="let it train as many steps as the setting `steps` says, or give a smaller --warmup",
            )
        if not run.whole(self._study.warmup):
            raise ConfigError(
                f"no timed step has the full {run.most_samples:,} samples: all are the last of an epoch",
                fix="give more --steps, or a smaller batch.global_size",
            )

    def result(self) -> Scaling:
        """Return the results of all runs."""
        study, trials = self._study, []
        for world in study.worlds:
            shared = _shared_by(self._last[world], self._config)
            trials.append(Trial(world, self._batch_of(world).lanes, shared, self._paces[world]))
        now = datetime.datetime.now(datetime.UTC).astimezone()
        return Scaling(
            name=self._config["name"],
            script=study.target.name,
            words=[*map(without_logins, study.words)],
            kind="weak" if study.weak else "strong",
            warmup_steps=study.warmup,
            steps=study.steps,
            rounds=study.rounds,
            finished=now.isoformat(timespec="seconds"),
            facts=self._facts(),
            sizes=sizes_of(trials),
        )

    def _facts(self) -> dict[str, Any]:
        """Return machine, versions and settings, as rank 0 of the largest run recorded them."""
        run = self._last[self._study.worlds[-1]].facts
        facts = {"paceline": VERSION}
        facts |= {name: run[name] for name in _FROM_RUN}
        facts |= {name: self._config[name] for name in _FROM_CONFIG}
        return facts

    def _say(self, text: str) -> None:
        if self._study.progress is not None:
            self._study.progress.write(f"{text}\n")


def _shared_by(run: RecordedRun, config: Mapping[str, Any]) -> str:
    """Return which cores or GPUs the ranks of a node had to share, as a phrase."""
    per_node = len(run.devices) // run.facts["nodes"]
    if run.facts["gpu"]:
        gpus = len(set(run.devices[:per_node]))
        if gpus >= per_node:
            return ""
        return f"{per_node} ranks share {gpus} GPU{'s' if gpus > 1 else ''}"
    cores, threads = run.facts["cores"], config["threads"]
    if per_node * threads <= cores:
        return ""
    ranks = f"{per_node} ranks" if threads == 1 else f"{per_node} ranks of {threads} threads"
    return f"{ranks} share {cores} core{'s' if cores > 1 else ''}"
