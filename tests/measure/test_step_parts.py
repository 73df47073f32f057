"""Do the candidates for parts of the GPT step compute what today's code computes?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.step_part_checks import BENCHMARKS, CHECKS

ROOT = BENCHMARKS.parent


def in_interpreter(*words: str) -> str:
    """Run a program in Triton's interpreter, which must be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each check raised."""
    return json.loads(in_interpreter("tests/support/step_part_checks.py"))


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_is_right(raised: dict[str, str], name: str) -> None:
    assert raised[name] == ""


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch):
    for folder in (BENCHMARKS / "gpu", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(
        "step_parts_measuring", BENCHMARKS / "gpu/parts/measuring.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def part_of(measuring, **steps):
    return measuring.Part(
        "part", [measuring.Candidate(name, lambda step=step: step) for name, step in steps.items()]
    )


def test_a_candidate_that_raises_is_a_row_and_stops_no_other(measuring) -> None:
    def fails():
        raise RuntimeError("no such kernel | here\nand more")

    part = part_of(
        measuring,
        today=lambda: [torch.ones(3)],
        broken=fails,
        other=lambda: [torch.full((3,), 1.5)],
    )
    rows = measuring.measure(part, 2, time.monotonic() + 60, cuda=False)
    assert [row.failure for row in rows] == ["", "RuntimeError: no such kernel / here", ""]
    assert [len(row.times) for row in rows] == [2, 0, 2]
    assert [row.error for row in rows[::2]] == [0.0, 0.5]
    assert [row.as_today for row in rows[::2]] == [True, False]
    assert all(len(row.words(rows[0].times)) == len(measuring.HEAD) for row in rows)


def test_bits_that_change_from_run_to_run_are_seen(measuring) -> None:
    count = iter(range(100))
    part = part_of(
        measuring,
        steady=lambda: [torch.ones(2)],
        restless=lambda: [torch.ones(2) * next(count)],
    )
    rows = measuring.measure(part, 0, time.monotonic() + 60, cuda=False)
    assert [row.same_bits for row in rows] == [True, False]


def test_what_has_no_time_left_is_not_run(measuring) -> None:
    part = part_of(measuring, today=lambda: [torch.ones(1)])
    assert "no time" in measuring.measure(part, 3, time.monotonic() - 1, cuda=False)[0].failure


def test_the_command_compares_results_without_a_gpu() -> None:
    words = ["benchmarks/gpu/step_parts.py", "--device", "cpu", "--only", "fp8"]
    lines = in_interpreter(*words).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    found = {(row[0], row[1]): row for row in cells}
    assert found["product: dW", "fp8"][6:] == ["yes", "no"]
    assert float(found["product: dW", "fp8"][5]) < 0.1
    assert found["gradient to fp8", "both orders"][5:] == ["0.0e+00", "yes", "yes"]
    assert found["transpose of fp8", "Triton"][5:] == ["0.0e+00", "yes", "yes"]


def test_the_command_says_that_no_gpu_has_run_it() -> None:
    text = Path(BENCHMARKS / "gpu/step_parts.py").read_text(encoding="utf-8")
    assert "has not been run on a GPU yet" in text
