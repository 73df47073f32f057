"""Does a training survive anything? Runs it untouched, then again under random signals and on changing numbers of ranks."""

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
from paceline.verify.kill_plan import Striker

_SAVES_PER_KILL = 4
_STUCK = 30  # launches in a row without a step forward
_COMPARED = ("step", "epoch", "samples", "loss", "lr", "metrics")
_WATCHED = {"StepDone", "EpochDone"}

History = list[dict[str, Any]]


@dataclass
class ChaosResult:
    """What chaos found."""

    script: str
    kills: int
    same: bool = True
    rounds: int = 0
    launches: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    freezes: int = 0
    worlds: Counter[int] = field(default_factory=Counter)
    steps_done: int = 0
    """Steps taken in all, those that were lost and taken again included."""
    steps: int = 0
    digest: str = ""
    difference: str = ""


@dataclass
class Chaos:
    """One script, and what is done to it."""

    target: Program
    arguments: tuple[str, ...]
    worlds: list[int]
    kills: int
    seed: int
    folder: Path
    progress: TextIO | None = None
    _signals: StopSignals = field(default_factory=StopSignals)
    """Those that came to this process: not the striker's, which go to the ranks. Somebody wants all of it to end."""

    def run(self) -> ChaosResult:
        """Run clean, then in rounds under strikes until the kills are spent; compare every round with the clean run."""
        with self._signals:
            return self._run()

    def _run(self) -> ChaosResult:
        dice = random.Random(self.seed)  # noqa: S311 - a plan that can be repeated, not a secret
        clean = self._clean()
        started = next(event for event in clean if event["event"] == RunStarted.__name__)
        seconds = clean[-1]["time_s"] - started["time_s"]
        verdict = ChaosResult(
            self.target.name, self.kills, steps=clean[-1]["step"], digest=clean[-1]["digest"]
        )
        rhythm = _Rhythm(
            save_every=max(1, verdict.steps // (_SAVES_PER_KILL * max(4, self.kills))),
            spread_s=max(0.2, min(3.0, 2.0 * seconds / max(4, self.kills))),
        )
        while verdict.same and (sum(verdict.strikes.values()) < self.kills or not verdict.rounds):
            verdict.rounds += 1
            history = self._round(verdict, dice, rhythm)
            verdict.difference = first_difference(clean, history)
            verdict.same = not verdict.difference
        return verdict

    def _clean(self) -> History:
        self._say("running untouched")
        failure = self._launch("clean", self.worlds[0], "end")
        if failure is not None:
            raise RunFailed(self.target.name, self.worlds[0], failure)
        return self._history("clean")

    def _round(self, verdict: ChaosResult, dice: random.Random, rhythm: _Rhythm) -> History:
        """Launch, strike, launch again, until the run is complete."""
        name, stuck, furthest = f"round-{verdict.rounds}", 0, -1
        while True:
            world = dice.choice(self.worlds)
            failure, struck = self._strike(verdict, dice, rhythm, name, world)
            if failure is None:
                return self._history(name)
            if failure.permanent or not struck:
                raise RunFailed(self.target.name, world, failure, verdict.launches)
            self._say(
                f"{sum(verdict.strikes.values())}/{self.kills}: {struck} on {world}, saved {failure.progress}"
            )
            stuck, furthest = (
                (0, failure.progress) if failure.progress > furthest else (stuck + 1, furthest)
            )
            if stuck > _STUCK:
                raise TrainingError(
                    f"{_STUCK} launches in a row led nowhere",
                    fix="let the script save: it needs `Trainer`",
                )

    def _strike(
        self, verdict: ChaosResult, dice: random.Random, rhythm: _Rhythm, name: str, world: int
    ) -> tuple[Failure | None, str]:
        """Launch once and strike once, unless the kills are spent; return how it ended, and what was done to it."""
        starts, steps = self._count(name, RunStarted.__name__), self._count(name, StepDone.__name__)
        armed = sum(verdict.strikes.values()) < self.kills
        striker = Striker(
            dice,
            lambda: self._count(name, RunStarted.__name__) > starts,
            rhythm.spread_s,
            armed=armed,
        )
        failure = self._launch(name, world, f"{rhythm.save_every}steps", striker)
        verdict.launches += 1
        verdict.worlds[world] += 1
        verdict.steps_done += self._count(name, StepDone.__name__) - steps
        if failure is not None and striker.kind:
            verdict.strikes[striker.kind] += 1
            verdict.freezes += striker.froze
        return failure, striker.kind

    def _launch(
        self, name: str, world: int, every: str, striker: Striker | None = None
    ) -> Failure | None:
        settings = {
            "runs": str(self.folder),
            "name": name,
            "log.every_steps": 1,
            "checkpoint.every": every,
            "resume": "auto",
        }
        spec = LaunchSpec(self.target, world, self.arguments, settings)
        failure = launch(spec, each_look=striker, signals=self._signals)
        if self._signals.count:
            raise RunFailed(self.target.name, world, stopped(None))
        return failure

    def _history(self, name: str) -> History:
        events = self._events(name)
        found = surviving(events) if events.is_file() else []
        if not found or found[-1]["event"] != RunEnded.__name__:
            raise TrainingError(
                f"{self.target.name} left no events of a complete run",
                fix="train with `paceline.Trainer`, which writes them",
            )
        return found

    def _events(self, name: str) -> Path:
        return self.folder / name / "events.jsonl"

    def _count(self, name: str, kind: str) -> int:
        """Return how many events of a kind a run has written, in all its processes."""
        events = self._events(name)
        return events.read_bytes().count(f'{{"event": "{kind}"'.encode()) if events.is_file() else 0

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.write(f"{text}\n")
            self.progress.flush()


@dataclass(frozen=True)
class _Rhythm:
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
    """Run a target clean and under chaos, in a scratch folder, and compare."""
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
        return Chaos(target, arguments, worlds, kills, seed, Path(folder), progress).run()


def first_difference(clean: History, other: History) -> str:
    """Return where two histories part, in words; empty if they do not.

    >>> first_difference([{"event": "StepDone", "step": 1, "loss": 0.5}], [{"event": "StepDone", "step": 1, "loss": 0.25}])
    'StepDone of step 1: loss was 0.5, is 0.25'
    """
    one, two = (
        [event for event in history if event["event"] in _WATCHED] for history in (clean, other)
    )
    for mine, theirs in zip(one, two, strict=False):
        for name in _COMPARED:
            if mine.get(name) != theirs.get(name):
                return f"{mine['event']} of step {mine['step']}: {name} was {mine.get(name)}, is {theirs.get(name)}"
    if len(one) != len(two):
        return f"{len(one)} figures of steps and epochs were written, now {len(two)}"
    digests = [history[-1].get("digest", "") for history in (clean, other)]
    return (
        ""
        if digests[0] == digests[1]
        else f"the last weights and optimizer state: {digests[0][:16]}, now {digests[1][:16]}"
    )


def as_json(verdict: ChaosResult) -> str:
    """Return a verdict as JSON."""
    return json.dumps(vars(verdict), indent=2)


def describe(verdict: ChaosResult) -> str:
    """Return a verdict for people."""
    struck = ", ".join(f"{count} x {kind}" for kind, count in sorted(verdict.strikes.items()))
    worlds = ", ".join(f"{count} x {world}" for world, count in sorted(verdict.worlds.items()))
    again = verdict.steps_done - verdict.rounds * verdict.steps
    lines = [
        f"{verdict.script}: {verdict.steps} steps, {verdict.rounds} times under chaos; untouched {verdict.digest[:16]}",
        f"  strikes   {sum(verdict.strikes.values())} ({struck}); {verdict.freezes} x frozen for a moment",
        f"  launches  {verdict.launches}; on ranks: {worlds}",
        f"  steps     {verdict.steps_done} taken, {max(0, again)} of them again after a strike",
        "the same bits: weights, optimizer state, and every loss"
        if verdict.same
        else f"NOT the same: {verdict.difference}",
    ]
    return "\n".join(lines)
