"""Whether a combination trains the same bits on 1, 2 and 3 ranks and through two resumes, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from combinations.ranks import Answer, RankGroup
from combinations.training import STEPS

WORLDS = (1, 2, 3)
_STOPS = ((3, 1), (1, 4), (2, STEPS))
"""Ranks, and the step after which they stop: in the middle of both epochs. The last reach the end."""


class Verdict(NamedTuple):
    """One line of the table."""

    name: str
    kind: str
    """same, refused, different or traceback."""
    details: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the contract holds."""
        return self.kind in {"same", "refused"}

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" if self.details else self.kind


class Judge:
    """Trains combinations on groups of ranks of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._groups = {world: RankGroup(world, folder) for world in WORLDS}

    def close(self) -> None:
        """End all ranks."""
        for group in self._groups.values():
            group.close()

    def judge(self, name: str) -> Verdict:
        """Train one combination in all ways, and compare."""
        runs = self._folder / "runs"
        answers: dict[str, list[Answer]] = {}
        try:
            for world in WORLDS:
                home = runs / str(world)
                answers[_ranks(world)] = self._groups[world].train(name, home, -1)
            if all(each.kind == "trained" for group in answers.values() for each in group):
                answers |= self._resumed(name, runs / "resumed")
        finally:
            shutil.rmtree(runs, ignore_errors=True)
        return _verdict(name, answers)

    def _resumed(self, name: str, home: Path) -> dict[str, list[Answer]]:
        """Return the answers of the parts of one training; each has the losses of its own steps."""
        answers = {}
        for world, stop_at in _STOPS:
            label = f"resume on {_ranks(world)}"
            answers[label] = self._groups[world].train(name, home, stop_at)
            if any(answer.kind != "trained" for answer in answers[label]):
                break
        return answers


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _verdict(name: str, answers: dict[str, list[Answer]]) -> Verdict:
    every = [(label, answer) for label, group in answers.items() for answer in group]
    refused = [(label, answer) for label, answer in every if answer.kind == "refused"]
    failed = [(label, answer) for label, answer in every if answer.kind == "traceback"]
    blocked = [(label, answer) for label, answer in every if answer.kind == "blocked"]
    # The launcher ends the other ranks as soon as one has refused: what they do then does not matter.
    labels = {label for label, _ in refused}
    for label, answer in [*failed, *blocked]:
        if label not in labels:
            return Verdict(name, "traceback", f"{label}: {answer.message.partition(chr(10))[0]}")
    if different := _difference(answers):
        return Verdict(name, "different", different)
    if not refused:
        return Verdict(name, "same")
    return Verdict(name, "refused", _refusal(answers, *refused[0]))


def _refusal(answers: dict[str, list[Answer]], label: str, answer: Answer) -> str:
    first = answer.message.partition("\n")[0]
    if label != next(iter(answers)):
        first = f"{first} ({label})"
    return f"{first} (after update {answer.updates})" if answer.updates else first


def _difference(answers: dict[str, list[Answer]]) -> str:
    """Return the first names that differ from those of one rank; empty if none does."""
    trained = {
        label: group
        for label, group in answers.items()
        if all(answer.kind == "trained" for answer in group)
    }
    if len(trained) < 2:
        return ""
    expected = next(iter(trained.values()))[0].record
    for label, group in trained.items():
        for rank, answer in enumerate(group):
            if names := _other_names(expected, answer.record):
                return f"{label}, rank {rank}: {', '.join(names[:3])} ({len(names)} in all)"
    return ""


def _other_names(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Return what differs; a part of a training lacks what another part has computed."""
    is_part = "stopped" in actual
    names = [name for name, value in actual.items() if expected.get(name, value) != value]
    unknown = [name for name in actual if name not in expected and name != "stopped"]
    steps = ("loss ", "metrics ")
    lost = [name for name in expected if name not in actual and not name.startswith(steps)]
    return names + unknown + ([] if is_part else lost)
