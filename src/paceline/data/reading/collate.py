"""Stack the samples of one lane into a batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from paceline.data.reading.nest import Nest, describe
from paceline.errors import ConfigError, PacelineError

Collate = Callable[[list[Any]], Nest]
"""collate(samples of one lane) -> batch."""


def stack(samples: list[Any], collate: Collate | None) -> Nest:
    """Return the samples of a lane as one batch: by `collate`, or by torch's default_collate.

    The default returns tuples where torch returns lists.
    """
    try:
        if collate is not None:
            return collate(samples)
        batch = default_collate(samples)
    except PacelineError:
        raise
    except Exception as error:
        raise _not_stacked(samples, collate, error) from error
    return tuple(batch) if type(batch) is list else batch


def _not_stacked(samples: Sequence[Any], collate: Collate | None, error: Exception) -> ConfigError:
    name = "default_collate" if collate is None else getattr(collate, "__name__", "collate")
    shown = " and ".join(_different(samples))
    fix = "pass collate=, a function that makes a batch of a list of such samples"
    if collate is not None:
        fix = f"correct {name}, or {fix}"
    return ConfigError(
        f"{name} cannot make a batch of {len(samples)} samples such as {shown}: "
        f"{type(error).__name__}: {error}{_place(error)}",
        fix=fix,
    )


def _different(samples: Sequence[Any]) -> list[str]:
    """Describe the first sample, and the first one that looks different."""
    seen = dict.fromkeys(map(describe, samples))
    return list(seen)[:2]


def _place(error: Exception) -> str:
    """Return where an error was raised: a worker process cannot send its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
