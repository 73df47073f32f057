"""Are candidates for parts of the GPT step compared and timed as the table says?"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch):
    for folder in (BENCHMARKS / "gpu", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    file = BENCHMARKS / "gpu/parts/measuring.py"
    spec = importlib.util.spec_from_file_location("step_parts_measuring", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def part_of(measuring, **steps):
    return measuring.Part("part", [measuring.Candidate(n, lambda s=s: s) for n, s in steps.items()])


def test_a_candidate_that_raises_is_a_row_and_stops_no_other(measuring) -> None:
    def fails():
        raise RuntimeError("no such kernel | here\nand more")

    def today():
        return [torch.ones(3)]

    part = part_of(measuring, today=today, broken=fails, other=lambda: [1.5 * today()[0]])
    rows = measuring.measure(part, 2, time.monotonic() + 60, cuda=False)
    assert [row.failure for row in rows] == ["", "RuntimeError: no such kernel / here", ""]
    assert [len(row.times) for row in rows] == [2, 0, 2]
    assert [row.error for row in rows[::2]] == [0.0, 0.5]
    assert [row.as_today for row in rows[::2]] == [True, False]
    assert all(len(row.words(rows[0].times)) == len(measuring.HEAD) for row in rows)


def test_bits_that_change_from_run_to_run_are_seen(measuring) -> None:
    count = iter(range(100))
    ones = torch.ones(2)
    part = part_of(measuring, steady=lambda: [ones], restless=lambda: [ones * next(count)])
    rows = measuring.measure(part, 0, time.monotonic() + 60, cuda=False)
    assert [row.same_bits for row in rows] == [True, False]


def test_what_has_no_time_left_is_not_run(measuring) -> None:
    part = part_of(measuring, today=lambda: [torch.ones(1)])
    assert "no time" in measuring.measure(part, 3, time.monotonic() - 1, cuda=False)[0].failure
