"""On a GPU, over both backends: a stop request, a killed rank, and kills at random end with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from paceline.errors import STOPPED
from support.program import Done, around, paceline, started
from survive.conftest import SCRIPT, SHORT, digest, pid

pytestmark = pytest.mark.gpu
BACKENDS = ["gloo", "nccl"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an undisturbed run of one rank."""
    words = around(SCRIPT, (*SHORT, "device=cuda"))
    return digest(paceline("run", *words, folder=tmp_path_factory.mktemp("alone")).out)


def words_for(backend: str) -> list[str]:
    """Return the words of `paceline run` after the number of ranks."""
    more = ("checkpoint.every=2steps", "device=cuda", f"backend={backend}")
    return around(SCRIPT, (*SHORT, *more))


def struck(folder: Path, backend: str, number: signal.Signals) -> Done:
    """Train on two ranks, and send rank 1 a signal when a checkpoint is being saved."""
    words = ["run", "-n", "2", *words_for(backend)]
    with started(*words, folder=folder, env={"SLOW_STEP": "0.1"}) as running:
        pid(folder, "save", 0)
        os.kill(pid(folder, "step", 1), number)
        done = running.wait()
        assert running.left_over() == []
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_run_saves_and_resumes_on_one_rank(backend, alone, tmp_path):
    done = struck(tmp_path, backend, signal.SIGTERM)
    assert done.code == STOPPED, done
    done = paceline("run", *words_for(backend), folder=tmp_path)
    assert digest(done.out) == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(backend, alone, tmp_path):
    done = struck(tmp_path, backend, signal.SIGKILL)
    assert done.code == 0, done
    assert "restarting on 2 ranks from the checkpoint of step " in done.err
    assert digest(done.out) == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_at_random_leave_the_same_bits(backend: str, tmp_path: Path) -> None:
    words = ("--kills", "2", "--seed", "3", "--worlds", "1,2", "--json")
    settings = ("batch.global_size=16", "epochs=12", "device=cuda", f"backend={backend}")
    slow = {"SLOW_STEP": "0.02"}
    done = paceline("chaos", *around(SCRIPT, (*words, *settings)), folder=tmp_path, env=slow)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["same"]
    assert sum(found["strikes"].values()) == 2
