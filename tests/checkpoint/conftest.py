"""What holds for the tests of checkpoints."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch) -> None:
    """Do not flush to disk, which takes half of the time: no test cuts the power. One sees that it is asked for."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
