"""What a rank gets for its start: seeds, no garbage collection in recipes, and its share of the cores to compile with."""

from __future__ import annotations

import gc
import os

import pytest

from paceline.launch.gc_pause import pause_gc, resume_gc
from paceline.launch.spec import LaunchSpec, script
from support.checkpoint_trainings import settings, train
from support.program import paceline

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


DRAWS = """
import os, random  # not a training of paceline, but it says the word
print("|", hash("a word"), random.random())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
"""


def test_all_ranks_and_restarts_hash_and_draw_alike_by_the_seed(tmp_path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)

    def drawn(*words: str, env: dict[str, str] | None = None) -> set[str]:
        options = ("-n", "2", "--max-restarts", "1")
        # Cold: the processes of the fork server share one hash seed.
        done = paceline("run", *options, "draws.py", *words, folder=tmp_path, cold=True, env=env)
        assert done.code == 0, done.err
        found = [line.partition("|")[2] for line in done.out.splitlines() if "|" in line]
        assert len(found) >= 3
        return set(found)

    zero = drawn()
    assert len(zero) == 1
    assert zero == drawn("--seed=0")
    one = drawn("seed=1", env={"PYTHONHASHSEED": "0"})
    assert len(one) == 1
    assert one.isdisjoint(zero)
    hashes = {text.split()[0] for text in one | zero}
    assert len(hashes) == 1, "the user's own hash seed was replaced"
