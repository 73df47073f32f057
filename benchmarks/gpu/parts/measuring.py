"""How are candidates for a part of the step compared? First their results and bits, then their times, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from ratios import ratios, rotated, spread
from torch import Tensor

Step = Callable[[], Sequence[Tensor]]
_AIM_MS = 20.0  # a measurement repeats a step until it takes about this long
_ROWS = 1024  # a comparison in fp32 takes this many rows at a time


@dataclass
class Candidate:
    """One way to compute a part."""

    name: str
    make: Callable[[], Step]
    """Returns a function that runs the part once and returns what it computed; may raise."""
    prepare: Callable[[], object] = field(default=lambda: None)
    """Restores inputs that the step overwrites."""


@dataclass
class Part:
    """Candidates for one computation; today's code is the first."""

    name: str
    candidates: list[Candidate]
    expected: Callable[[], Sequence[Tensor]] | None = None
    """Returns the results in a higher precision, of the first rows at least; None: today's."""


@dataclass
class Row:
    """What was found out about a candidate."""

    part: str
    name: str
    error: float = float("nan")
    same_bits: bool = False
    as_today: bool = False
    times: list[float] = field(default_factory=list)
    failure: str = ""

    def words(self, today: list[float]) -> list[str]:
        """Return the cells of the table."""
        if self.failure:
            return [self.part, self.name, self.failure, "", "", "", "", ""]
        bits = ["no", "yes"]
        rounds = min(len(self.times), len(today))
        ratio = spread(ratios(self.times[:rounds], today[:rounds])) if rounds else ""
        median = f"{sorted(self.times)[len(self.times) // 2]:.3f}" if self.times else ""
        limits = f"{min(self.times):.3f}-{max(self.times):.3f}" if self.times else ""
        return [
            self.part, self.name, median, limits, ratio,
            f"{self.error:.1e}", bits[self.same_bits], bits[self.as_today],
        ]  # fmt: skip


HEAD = ["part", "candidate", "median ms", "range", "ratio to today's", "max error", "same bits twice", "bits as today's"]  # fmt: skip


def max_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest expected value of each tensor.

    >>> max_error([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])])
    0.25
    """
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if other.dim() == 0:
            pairs = [(one, other)]
        else:
            pairs = list(zip(one[: len(other)].split(_ROWS), other.split(_ROWS), strict=True))
        largest = max(b.double().abs().max().item() for _, b in pairs)
        gap = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
        if gap != gap or largest == 0.0:  # noqa: PLR0124 - NaN
            return float("nan")
        worst = max(worst, gap / largest)
    return worst


def equal_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether two results have the same bits; fp8 has no comparison of its own."""

    def plain(value: Tensor) -> Tensor:
        return value.view(torch.uint8) if value.element_size() == 1 else value

    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(plain(a), plain(b))
        for a, b in zip(one, other, strict=True)
    )


def _milliseconds(step: Step, repeats: int, *, cuda: bool) -> float:
    if not cuda:
        begun = time.perf_counter()
        for _ in range(repeats):
            step()
        return 1000 * (time.perf_counter() - begun) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / repeats


def _copied(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def failure_of(error: Exception) -> str:
    """Return the first line of an error, for a cell of a table."""
    words = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {words}"[:160].replace("|", "/")


def _check(part: Part, deadline: float) -> tuple[list[Row], dict[str, Step]]:
    """Run every candidate twice; return the rows, and the steps of those that can be timed."""
    rows: list[Row] = []
    steps: dict[str, Step] = {}
    expected = part.expected() if part.expected else None
    today: list[Tensor] | None = None
    for candidate in part.candidates:
        row = Row(part.name, candidate.name)
        rows.append(row)
        if time.monotonic() > deadline:
            row.failure = "not run: no time was left"
            continue
        try:
            step = candidate.make()
            candidate.prepare()
            found = _copied(step())
            candidate.prepare()
            row.same_bits = equal_bits(found, _copied(step()))
            today = found if today is None else today
            row.as_today = equal_bits(found, today)
            row.error = max_error(found, expected or today)
        except Exception as error:  # noqa: BLE001 - a candidate that fails is a result
            row.failure = failure_of(error)
            continue
        steps[candidate.name] = step
    return rows, steps


def measure(part: Part, rounds: int, deadline: float, *, cuda: bool) -> list[Row]:
    """Check and time the candidates of a part, in rotated order each round."""
    rows, steps = _check(part, deadline)
    if rounds == 0:
        return rows
    if cuda:
        torch.cuda.empty_cache()
    repeats = {
        name: max(1, min(50, int(_AIM_MS / max(_milliseconds(step, 2, cuda=cuda), 1e-3))))
        for name, step in steps.items()
    }
    by_name = {row.name: row for row in rows}
    for number in range(rounds if steps else 0):
        if number >= 2 and time.monotonic() > deadline:
            break
        for name in rotated(list(steps), number):
            by_name[name].times.append(_milliseconds(steps[name], repeats[name], cuda=cuda))
    return rows
