"""Does a training survive kills? Runs it undisturbed, then under random signals and world sizes."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import TrainingError
from paceline.events import RunEnded, RunStarted, StepDone, surviving
from paceline.launch.failure import Failure, RunFailed, stopped
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch
from paceline.verify.kill_plan import Killer

_SAVES_PER_KILL = 4
_MAX_STUCK = 30  # launches in a row without a new checkpoint
_COMPARED = ("step", "epoch", "samples", "loss", "lr", "metrics")
_COMPARED_EVENTS = {"StepDone", "EpochDone"}

History = list[dict[str, Any]]


@dataclass
class ChaosResult:
    """What was done to the training, and whether its bits are the same. A JSON key per field."""

    script: str
    kills: int
    same: bool = True
    rounds: int = 0
    """Complete runs with kills."""
    launches: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    """Kills by kind."""
    freezes: int = 0
    """Kills before which a rank was paused."""
    worlds: Counter[int] = field(default_factory=Counter)
    """Launches by world size."""
    steps_done: int = 0
    """All steps done, including those that were lost and repeated."""
    steps: int = 0
    digest: str = ""
    difference: str = ""

    @property
    def kills_done(self) -> int:
        """How many kills have been done so far."""
        return sum(self.strikes.values())


@dataclass
class Chaos:
    """A script, and how it is to be killed."""

    target: Program
    arguments: tuple[str, ...]
    worlds: list[int]
    kills: int
    seed: int
    folder: Path
    progress: TextIO | None = None
    _signals: StopSignals = field(default_factory=StopSignals)
    """Signals to this process, not those of the plan, which go to the ranks: a user's request to stop."""

    def run(self) -> ChaosResult:
        """Run undisturbed, then with kills until all are done; compare every run with the first."""
        with self._signals:
            return self._run()

    def _run(self) -> ChaosResult:
        rng = random.Random(self.seed)  # noqa: S311 - a plan that can be repeated, not a secret
        reference = self._undisturbed()
        started = next(event for event in reference if event["event"] == RunStarted.__name__)
        end = reference[-1]
        seconds = end["time_s"] - started["time_s"]
        result = ChaosResult(self.target.name, self.kills, steps=end["step"], digest=end["digest"])
        timing = _Timing(
            save_every=max(1, result.steps // (_SAVES_PER_KILL * max(4, self.kills))),
            spread_s=max(0.2, min(3.0, 2.0 * seconds / max(4, self.kills))),
        )
        while result.same and (result.kills_done < self.kills or not result.rounds):
            result.rounds += 1
            history = self._round(result, rng, timing)
            result.difference = first_difference(reference, history)
            result.same = not result.difference
        return result

    def _undisturbed(self) -> History:
        self._say("running undisturbed ...")
        failure = self._launch("clean", self.worlds[0], "end")
        if failure is not None:
            raise RunFailed(self.target.name, self.worlds[0], failure)
        return self._history("clean")

    def _round(self, result: ChaosResult, rng: random.Random, timing: _Timing) -> History:
        """Launch and kill until the run is complete."""
        name, stuck, furthest = f"round-{result.rounds}", 0, -1
        while True:
            world = rng.choice(self.worlds)
            failure, kind = self._kill_once(result, rng, timing, name, world)
            if failure is None:
                return self._history(name)
            if failure.permanent or not kind:
                raise RunFailed(self.target.name, world, failure, result.launches)
            ranks = "1 rank" if world == 1 else f"{world} ranks"
            done = f"kill {result.kills_done} of {self.kills}"
            self._say(f"{done}: {kind} on {ranks}, checkpoint at step {failure.progress}")
            stuck += 1
            if failure.progress > furthest:
                stuck, furthest = 0, failure.progress
            if stuck > _MAX_STUCK:
                raise TrainingError(
                    f"{_MAX_STUCK} launches in a row saved no new checkpoint",
                    fix="train with `paceline.Run`, which saves checkpoints",
                )

    def _kill_once(
        self, result: ChaosResult, rng: random.Random, timing: _Timing, name: str, world: int
    ) -> tuple[Failure | None, str]:
        """Launch once, kill once unless all kills are done; return the failure and the kind."""
        starts, steps = self._count(name, RunStarted.__name__), self._count(name, StepDone.__name__)
        killer = Killer(
            rng,
            lambda: self._count(name, RunStarted.__name__) > starts,
            timing.spread_s,
            armed=result.kills_done < self.kills,
        )
        failure = self._launch(name, world, f"{timing.save_every}steps", killer)
        result.launches += 1
        result.worlds[world] += 1
        result.steps_done += self._count(name, StepDone.__name__) - steps
        if failure is not None and killer.kind:
            result.strikes[killer.kind] += 1
            result.freezes += killer.froze
        return failure, killer.kind

    def _launch(
        self, name: str, world: int, every: str, killer: Killer | None = None
    ) -> Failure | None:
        settings = {
            "runs": str(self.folder),
            "name": name,
            "log.every_steps": 1,
            "checkpoint.every": every,
            "resume": "auto",
        }
        most = max(self.worlds)  # all launches have enough lanes for it
        spec = LaunchSpec(self.target, world, self.arguments, settings, most_ranks=most)
        failure = launch(spec, each_look=killer, signals=self._signals)
        if self._signals.count:
            raise RunFailed(self.target.name, world, stopped(None))
        return failure

    def _history(self, name: str) -> History:
        file = self._events(name)
        events = surviving(file) if file.is_file() else []
        if not events or events[-1]["event"] != RunEnded.__name__:
            raise TrainingError(
                f"{self.target.name} wrote no events of a complete run",
                fix="train with `paceline.Run`, which writes them",
            )
        return events

    def _events(self, name: str) -> Path:
        return self.folder / name / "events.jsonl"

    def _count(self, name: str, kind: str) -> int:
        """Return how many events of a kind all processes of a run have written."""
        file = self._events(name)
        return file.read_bytes().count(f'{{"event": "{kind}"'.encode()) if file.is_file() else 0

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.write(f"{text}\n")
            self.progress.flush()


@dataclass(frozen=True)
class _Timing:
    save_every: int
    spread_s: float


def chaos(
    target: Program,
    arguments: tuple[str, ...],
    worlds: list[int],
    kills: int,
    seed: int,
    progress: TextIO | None,
) -> ChaosResult:
    """Run a program undisturbed and with kills, in a temporary folder, and compare."""
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
        return Chaos(target, arguments, worlds, kills, seed, Path(folder), progress).run()


def first_difference(reference: History, other: History) -> str:
    """Return a sentence on the first difference of two histories; empty if there is none.

    >>> half = {"event": "StepDone", "step": 1, "loss": 0.5}
    >>> first_difference([half], [half | {"loss": 0.25}])
    'StepDone of step 1: loss was 0.5, is 0.25'
    """
    expected_events, actual_events = _compared(reference), _compared(other)
    for expected, actual in zip(expected_events, actual_events, strict=False):
        for name in _COMPARED:
            before, after = expected.get(name), actual.get(name)
            if before != after:
                step = f"{expected['event']} of step {expected['step']}"
                return f"{step}: {name} was {before}, is {after}"
    if len(expected_events) != len(actual_events):
        return f"{len(expected_events)} steps and epochs were logged, now {len(actual_events)}"
    before, after = reference[-1].get("digest", ""), other[-1].get("digest", "")
    if before != after:
        return f"final weights and optimizer state: was {before[:16]}, is {after[:16]}"
    return ""


def _compared(history: History) -> History:
    return [event for event in history if event["event"] in _COMPARED_EVENTS]


def as_json(result: ChaosResult) -> str:
    """Return a result as JSON."""
    return json.dumps(vars(result), indent=2)


def describe(result: ChaosResult) -> str:
    """Return a result as text for the terminal."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(result.strikes.items()))
    launches = []
    for world, count in sorted(result.worlds.items()):
        launches.append(f"{count} on {world} rank{'s' * (world > 1)}")
    repeated = max(0, result.steps_done - result.rounds * result.steps)
    runs = f"{result.rounds} run{'s' * (result.rounds > 1)} with random kills"
    lines = [
        f"{result.script}: {result.steps} steps, {runs}; reference {result.digest[:16]}",
        f"  kills     {result.kills_done} ({kinds}); {result.freezes} after a pause (SIGSTOP)",
        f"  launches  {result.launches}: {', '.join(launches)}",
        f"  steps     {result.steps_done} done, {repeated} of them repeated after a kill",
    ]
    if result.same:
        lines.append("the same bits: weights, optimizer state, and every loss")
    else:
        lines.append(f"NOT the same: {result.difference}")
    return "\n".join(lines)
