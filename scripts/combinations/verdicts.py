"""Whether a combination trains the same bits on 1, 2 and 3 ranks and through two resumes, or is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from combinations.ranks import Answer, RankGroup
from combinations.table import find
from combinations.training import STEPS

WORLDS, GPU_WORLDS = (1, 2, 3), (1, 2)
_STOPS = ((3, 1), (1, 4), (2, STEPS))
"""Ranks, and the step after which they stop: in the middle of both epochs. The last reach the end."""
_GPU_STOPS = ((2, 4), (1, STEPS))


class Verdict(NamedTuple):
    """One line of the table."""

    name: str
    kind: str
    """same, refused, trained (without a promise about the bits), different or traceback."""
    details: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the contract holds."""
        return self.kind in {"same", "refused", "trained"}

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" if self.details else self.kind


class Judge:
    """Trains combinations on groups of ranks of its own."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        worlds, self._stops = (WORLDS, _STOPS) if device == "cpu" else (GPU_WORLDS, _GPU_STOPS)
        self._groups = {world: RankGroup(world, folder, device) for world in worlds}

    def close(self) -> None:
        """End all ranks."""
        for group in self._groups.values():
            group.close()

    def judge(self, name: str) -> Verdict:
        """Train one combination in all ways, and compare."""
        runs = self._folder / "runs"
        answers: dict[str, list[Answer]] = {}
        try:
            for world in self._groups:
                home = runs / str(world)
                answers[_ranks(world)] = self._groups[world].train(name, home, -1)
            if all(each.kind == "trained" for group in answers.values() for each in group):
                answers |= self._resumed(name, runs / "resumed")
        finally:
            shutil.rmtree(runs, ignore_errors=True)
        exact = find(name).settings.get("exact", True)
        return _verdict(name, answers, exact=exact)

    def _resumed(self, name: str, home: Path) -> dict[str, list[Answer]]:
        """Return the answers of the parts of one training; each has the losses of its own steps."""
        answers = {}
        for world, stop_at in self._stops:
            label = f"resume on {_ranks(world)}"
            answers[label] = self._groups[world].train(name, home, stop_at)
            if any(answer.kind != "trained" for answer in answers[label]):
                break
        return answers


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _verdict(name: str, answers: dict[str, list[Answer]], *, exact: bool) -> Verdict:
    every = [(label, answer) for label, group in answers.items() for answer in group]
    refused = [(label, answer) for label, answer in every if answer.kind == "refused"]
    failed = [(label, answer) for label, answer in every if answer.kind == "traceback"]
    blocked = [(label, answer) for label, answer in every if answer.kind == "blocked"]
    # The launcher ends the other ranks as soon as one has refused: what they do then does not matter.
    labels = {label for label, _ in refused}
    for label, answer in [*failed, *blocked]:
        if label not in labels:
            return Verdict(name, "traceback", f"{label}: {answer.message.partition(chr(10))[0]}")
    if not exact and not refused:
        return _free(name, answers)
    if different := _difference(answers):
        return Verdict(name, "different", different)
    if not refused:
        return Verdict(name, "same")
    return Verdict(name, "refused", _refusal(answers, *refused[0]))


def _free(name: str, answers: dict[str, list[Answer]]) -> Verdict:
    """Judge a training whose sums have any order: all losses are numbers, and the same on all ranks of a world."""
    for label, group in answers.items():
        losses = [_losses(answer) for answer in group]
        if any(other != losses[0] for other in losses):
            return Verdict(name, "different", f"{label}: the ranks have other losses")
        if not all(math.isfinite(float.fromhex(text)) for text in losses[0]):
            return Verdict(name, "different", f"{label}: a loss is not finite")
    return Verdict(name, "trained")


def _losses(answer: Answer) -> list[str]:
    return [text for key, text in answer.record.items() if key.startswith("loss ")]


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
