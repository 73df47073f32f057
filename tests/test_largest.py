"""The command that finds the largest GPT of a GPU runs without one, on a model that any machine trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu/largest.py"


@pytest.mark.heavy  # a script of benchmarks/
def test_it_is_seen_what_fits_and_where_the_next_one_fails() -> None:
    words = [
        "--device",
        "cpu",
        "--tiny",
        "--precision",
        "fp32",
        "--limit-gb",
        "0.0003",
        "--most",
        "2",
    ]
    command = [sys.executable, SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "largest: 1 layers of width 32, 0.02 million parameters; out of memory" in done.stdout
    assert "| 1 | 0.02 million |" in done.stdout
    assert "all steps done |" in done.stdout
