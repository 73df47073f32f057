"""What a rank of a recipe gets for its start: no garbage collection, and its share of the cores to compile with."""

from __future__ import annotations

import gc
import os

import pytest

from paceline.launch.gc_pause import pause_gc, resume_gc
from paceline.launch.spec import LaunchSpec, script
from support.checkpoint_trainings import settings, train

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable() if before else gc.disable()


def test_garbage_is_collected_again_when_the_loop_begins(tmp_path) -> None:
    frozen = gc.get_freeze_count()
    pause_gc()
    assert not gc.isenabled()
    train(settings(tmp_path))
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_a_script_that_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    resume_gc()
    assert not gc.isenabled()


def test_ranks_share_the_cores_that_torch_compiles_with(monkeypatch, tmp_path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    program = script(str(tmp_path / "train.py"))
    for ranks, threads in ((1, "16"), (3, "5"), (32, "1")):
        assert LaunchSpec(program, ranks=ranks).variables({})[THREADS] == threads
        assert LaunchSpec(program, ranks=ranks).variables({THREADS: "7"})[THREADS] == "7"
