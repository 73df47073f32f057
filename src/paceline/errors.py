"""What can go wrong, and what to do about it.

PacelineError                 exit 1   the answer is no
├── TrainingError             exit 1   the training itself went wrong (a NaN loss, a dead rank)
├── ConfigError               exit 2   a setting or a command line that cannot be
└── EnvironmentUnfit          exit 3   this machine cannot do it
    ├── DataError             exit 3   a data file is missing, damaged or not what it claims to be
    └── BadCheckpoint         exit 3   a checkpoint is damaged, incomplete, or of a format not known here

Stopped (a SystemExit)        exit 75  not an error: saved and left in time, as it was told to; run it again to go on
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """An error that says what is wrong, with the numbers, and what to do."""

    exit_code = 1
    comes_again = True
    """Whether the same run would meet it again; if not, starting again may help."""

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}"


class TrainingError(PacelineError):
    """The training went wrong."""


class ConfigError(PacelineError):
    """A setting or a command line that cannot be."""

    exit_code = 2


class EnvironmentUnfit(PacelineError):
    """This machine cannot do what was asked."""

    exit_code = 3


class DataError(EnvironmentUnfit):
    """A data file is missing, damaged or not what it claims to be."""


class BadCheckpoint(EnvironmentUnfit):
    """A checkpoint is damaged, incomplete, or of a format not known here."""


LOST_PEER = 76
"""The exit code of a rank of a Slurm job that only lost another one: the cause is elsewhere."""

STOPPED = 75
"""The exit code that means: resume me. It is the system's own code for "try again later"."""


class Stopped(SystemExit):
    """Raised on every rank once a run that was told to stop has saved."""

    def __init__(self, step: int) -> None:
        super().__init__(STOPPED)
        self.step = step


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the fix for a wrong name: the nearest known one, or all of them.

    >>> did_you_mean("batch.lane", ["batch.lanes", "seed"])
    'did you mean batch.lanes?'
    >>> did_you_mean("xyz", ["mnist", "toy"])
    'use one of: mnist, toy'
    """
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"use one of: {', '.join(choices)}"
