"""Shared by the tests of stops and restarts: a training that can be interrupted at a chosen moment."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from support.program import paceline, wait_for

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "training.py")
SHORT = ("batch.global_size=16", "epochs=8", "log.every_steps=1")


def digest(text: str) -> str:
    """Return the digest at the end of a run's output."""
    found = re.search(r"weights and optimizer state (\w{16})", text)
    assert found, text
    return found[1]


def pid(folder: Path, place: str, rank: int = 0) -> int:
    """Return the process id of a rank once it has reached a place."""
    file = folder / "marks" / f"{place}-{rank}"
    wait_for(file)
    while not (text := file.read_text()):
        time.sleep(0.01)
    return int(text)


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an undisturbed run."""
    done = paceline("run", SCRIPT, *SHORT, folder=tmp_path_factory.mktemp("untouched"))
    assert "the script goes on after the training" in done.out
    return digest(done.out)
