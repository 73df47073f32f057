"""What can go wrong: the exception classes, and the exit code of each.

PacelineError                 exit 1   the check is negative
├── TrainingError             exit 1   the training itself went wrong (a NaN loss, a dead rank)
├── ConfigError               exit 2   a setting or a command line is invalid
└── EnvironmentUnfit          exit 3   this machine cannot do it
    ├── DataError             exit 3   a data file is missing, damaged or not what it claims to be
    └── BadCheckpoint         exit 3   a checkpoint is damaged, incomplete, or in an unknown format

Stopped (a SystemExit)        exit 75  not an error: saved and exited on request; rerun to resume
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """An error with its cause (values and limits) and its fix. All errors of Paceline derive from it.

    - `problem`: what happened, with the values that were seen.
    - `fix`: what to do about it, in the imperative.

    >>> print(PacelineError("batch.lanes must be >= 1, got 0", fix="set batch.lanes=1 or more"))
    batch.lanes must be >= 1, got 0
      fix: set batch.lanes=1 or more
    """

    exit_code = 1
    """The exit code of a program that ends with this error: 1, 2 for bad settings, 3 for an unfit environment."""
    comes_again = True
    """Whether a restart would fail in the same way."""

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}"


class TrainingError(PacelineError):
    """The training went wrong."""


class ConfigError(PacelineError):
    """A setting or a command line is invalid."""

    exit_code = 2


class NoSuchAttribute(ConfigError, AttributeError):
    """An object of Paceline has no attribute of this name."""


class EnvironmentUnfit(PacelineError):
    """This machine lacks something that the command needs."""

    exit_code = 3


class DataError(EnvironmentUnfit):
    """A data file is missing, damaged or not what it claims to be."""


class BadCheckpoint(EnvironmentUnfit):
    """A checkpoint is damaged, incomplete, or in an unknown format."""


LOST_PEER = 76
"""Exit code of a Slurm rank that failed only because another rank did."""

STOPPED = 75
"""Exit code for "rerun to resume": EX_TEMPFAIL of sysexits.h."""


class Stopped(SystemExit):
    """Raised on every rank after a requested stop, once the checkpoint is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(STOPPED)
        self.step = step


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a fix for a wrong name: the nearest known name, or all names.

    >>> did_you_mean("batch.lane", ["batch.lanes", "seed"])
    'did you mean batch.lanes?'
    >>> did_you_mean("xyz", ["mnist", "toy"])
    'use one of: mnist, toy'
    """
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"use one of: {', '.join(choices)}"
