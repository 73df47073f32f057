"""How much faster does a training get with more ranks? Runs it at several world sizes, round after round, and compares."""

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

_OF_THE_RUN = (
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
_OF_THE_CONFIG = ("exact", "parallel", "precision", "compile", "capture", "threads")


@dataclass(frozen=True)
class Study:
    """What to run, and how often."""

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
    """What the script makes a step of, at the smallest world."""

    global_size: int
    lanes: int


def run_study(study: Study) -> Scaling:
    """Run every world size once a round, every other round backwards, so that a busy hour falls on all alike."""
    shared = study.allocation is not None and not study.allocation.is_local
    with tempfile.TemporaryDirectory(
        prefix=".paceline-scale-", dir=Path.cwd() if shared else None
    ) as folder:
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
        """Run one world size to its end, and keep how it went."""
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        self._say(
            f"round {number + 1} of {self._study.rounds}: {self._study.target.name} on {ranks} ..."
        )
        home = self._folder / f"{number}-{world}"
        failure = run_ranks(
            self._study.target,
            world,
            self._study.words,
            self._settings(world, home),
            self._study.allocation,
        )
        if failure is not None:
            raise RunFailed(self._study.target.name, world, failure)
        ran = self._last[world] = read_run(home / "times", world, self._study.target.name)
        if self._batch is None:
            self._learn(home)
        self._check(world, ran)
        self._paces[world].append(pace_of(ran, self._study.warmup))
        shutil.rmtree(home)

    def _settings(self, world: int, home: Path) -> dict[str, object]:
        settings: dict[str, object] = {
            "record.times": str(home / "times"),
            "steps": self._study.warmup + self._study.steps,
            **isolated_settings(home),
        }
        if self._study.weak and self._batch is not None:
            batch = self._of_world(world)
            settings |= {"batch.global_size": batch.global_size, "batch.lanes": batch.lanes}
        return settings

    def _learn(self, home: Path) -> None:
        """Take the batch from what the first run said of itself; refuse what no later one could run."""
        file = next(home.glob("runs/*/config.toml"))
        self._config = tomllib.loads(file.read_text(encoding="utf-8"))
        batch = self._batch = Batch(**self._config["batch"])
        most = self._study.worlds[-1]
        if not self._study.weak and most > batch.lanes:
            raise ConfigError(
                f"{most} ranks cannot share the {batch.lanes} lanes of a step",
                fix=f"add batch.lanes={most} (it is then so at every size), leave {most} out of --worlds, or use --weak",
            )
        for world in self._study.worlds:
            self._of_world(world)

    def _of_world(self, world: int) -> Batch:
        """Return the batch of a world: the same in all, or grown with it."""
        assert self._batch is not None
        if not self._study.weak:
            return self._batch
        first = self._study.worlds[0]
        if self._batch.global_size * world % first or self._batch.lanes * world % first:
            raise ConfigError(
                f"a step of {first} ranks cannot grow to {world} in whole lanes",
                fix=f"give --worlds that are multiples of the smallest, such as {first},{2 * first},{4 * first}",
            )
        return Batch(self._batch.global_size * world // first, self._batch.lanes * world // first)

    def _check(self, world: int, ran: RecordedRun) -> None:
        wanted = self._of_world(world).global_size
        if ran.most_samples < wanted:
            raise ConfigError(
                f"a step of {wanted:,} samples on {world} ranks is more than the whole training set",
                fix="give batch.global_size a smaller value, or leave the large sizes out of --worlds",
            )
        if len(ran.steps) <= self._study.warmup:
            raise ConfigError(
                f"{self._study.target.name} took only {len(ran.steps)} steps",
                fix="let it take as many as the setting `steps` says, or give a smaller --warmup",
            )
        if not ran.whole(self._study.warmup):
            raise ConfigError(
                f"none of the steps that were timed has {ran.most_samples:,} samples: they are all at the end of an epoch",
                fix="give more --steps, or a smaller batch.global_size",
            )

    def result(self) -> Scaling:
        """Return the figures of all runs."""
        study = self._study
        trials = [
            Trial(
                world,
                self._of_world(world).lanes,
                _shared_by(self._last[world], self._config),
                self._paces[world],
            )
            for world in study.worlds
        ]
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
        """Return what a reader must know of machine and code: as the first rank of the largest run tells it."""
        run = self._last[self._study.worlds[-1]].facts
        return {
            "paceline": VERSION,
            **{name: run[name] for name in _OF_THE_RUN},
            **{name: self._config[name] for name in _OF_THE_CONFIG},
        }

    def _say(self, text: str) -> None:
        if self._study.progress is not None:
            self._study.progress.write(f"{text}\n")


def _shared_by(ran: RecordedRun, config: Mapping[str, Any]) -> str:
    """Return what ranks of one node had to share: cores, or GPUs."""
    each = len(ran.devices) // ran.facts["nodes"]
    if ran.facts["gpu"]:
        gpus = len(set(ran.devices[:each]))
        return f"{each} ranks share {gpus} GPU{'s' if gpus > 1 else ''}" if gpus < each else ""
    cores, threads = ran.facts["cores"], config["threads"]
    if each * threads <= cores:
        return ""
    busy = f"{each} ranks" if threads == 1 else f"{each} ranks of {threads} threads"
    return f"{busy} share {cores} core{'s' if cores > 1 else ''}"
