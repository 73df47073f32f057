"""The command that finds the largest GPT of a GPU runs without one, on a model that any machine trains."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu/largest.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", sys.path[:])
    spec = importlib.util.spec_from_file_location("largest", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            {"device": "cuda", "width": 4096, "heads": 32, "length": 1024, "first": 8, "layers": 0},
        ),
        (["--tiny", "--device", "cpu"], {"device": "cpu", "width": 32, "most": 4}),
        (
            ["--tiny", "--most", "2", "--precision", "bf16-master"],
            {"most": 2, "width": 32, "precision": "bf16-master"},
        ),
    ],
)
def test_what_is_not_said_is_usual_or_tiny(
    script: ModuleType, words: list[str], expected: dict
) -> None:
    known = vars(script.parsed(words))
    assert {name: known[name] for name in expected} == expected


@pytest.mark.heavy  # a script of benchmarks/, whose arithmetic is tested above
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
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "largest: 1 layers of width 32, 0.02 million parameters; out of memory" in done.stdout
    assert "| 1 | 0.02 million |" in done.stdout
    assert "all steps done |" in done.stdout
