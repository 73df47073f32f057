"""Compiled code is found again at the next start, never for other settings, and never where others can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.doctor.compiled_code import judge_compiled_code
from paceline.errors import EnvironmentUnfit
from paceline.world import compile_cache
from paceline.world.compile_cache import INDUCTOR, TRITON, cache_root, keep_compiled_code
from paceline.world.device import compile_facts
from support.processes import run_on_processes

FACTS = {"torch": "2.13.0", "card": "cpu", "threads": 1}


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a process whose user has a cache folder and a temporary folder of their own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(compile_cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_folder_is_private_and_the_same_at_the_next_start(env: dict[str, str]) -> None:
    assert keep_compiled_code(env, FACTS) == ""
    first = Path(env[INDUCTOR])
    assert first.parent == cache_root(env)
    assert Path(env[TRITON]) == first / "triton"
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    keep_compiled_code(env, FACTS)
    assert Path(env[INDUCTOR]) == first


def test_what_changes_compiled_code_has_a_folder_of_its_own(env: dict[str, str]) -> None:
    found = set()
    changes = [{}, {"torch": "2.11.0"}, {"card": "H200"}, {"threads": 2}]
    for change in changes:
        keep_compiled_code(env, FACTS | change)
        found.add(env[INDUCTOR])
    assert len(found) == len(changes)
    facts = [compile_facts("cpu", config) for config in (RunConfig(), RunConfig(threads=2))]
    assert facts[0] != facts[1]


def test_what_somebody_put_where_torch_reads_compiled_code_is_refused(env: dict[str, str]) -> None:
    place = compile_cache._default()
    for plant in (Path.touch, lambda place: place.symlink_to(place.with_name("nowhere"))):
        plant(place)
        with pytest.raises(EnvironmentUnfit, match="set TMPDIR"):
            keep_compiled_code(env, FACTS)
        place.unlink()


def test_torchs_own_default_is_replaced_and_a_choice_of_the_user_stays(
    env: dict[str, str], tmp_path: Path
) -> None:
    env[INDUCTOR] = str(compile_cache._default())  # torch writes it there when it is imported
    keep_compiled_code(env, FACTS)
    assert Path(env[INDUCTOR]).parent == cache_root(env)
    env[INDUCTOR] = str(tmp_path / "mine")
    keep_compiled_code(env, FACTS)
    assert env[INDUCTOR] == str(tmp_path / "mine")


def test_a_folder_that_others_can_write_or_replace_is_refused(env, tmp_path: Path) -> None:
    keep_compiled_code(env, FACTS)
    for mode in (0o777, 0o770, 0o720):
        cache_root(env).chmod(mode)
        with pytest.raises(EnvironmentUnfit, match="XDG_CACHE_HOME"):
            keep_compiled_code(env, FACTS)
        assert not judge_compiled_code(env).ok
    (open_to_all := tmp_path / "open").mkdir()
    env = {"XDG_CACHE_HOME": str(open_to_all / "cache")}
    open_to_all.chmod(0o777)
    with pytest.raises(EnvironmentUnfit, match=f"{open_to_all} "):
        keep_compiled_code(env, FACTS)
    open_to_all.chmod(0o1777)  # as /tmp: only the owner may rename or remove
    assert keep_compiled_code(env, FACTS) == ""


def test_others_lose_access_to_torchs_default_folder(env: dict[str, str]) -> None:
    default = compile_cache._default()
    (planted := default / "precompiled_headers").mkdir(parents=True)
    default.chmod(0o777)
    keep_compiled_code(env, FACTS)
    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    assert not planted.exists()


def test_without_a_folder_to_write_code_is_compiled_and_not_kept(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    monkeypatch.setattr(compile_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    assert "compiled code is not kept" in keep_compiled_code(env, FACTS)
    assert Path(env[INDUCTOR]).parent == tmp_path / "tmp"
    (tmp_path / "cache").unlink()
    assert keep_compiled_code(env, FACTS) == ""


def test_doctor_says_where_compiled_code_is_and_how_to_remove_it(env: dict[str, str]) -> None:
    assert "none yet" in judge_compiled_code(env).says
    assert not cache_root(env).exists()
    keep_compiled_code(env, FACTS)
    (Path(env[INDUCTOR]) / "code").write_bytes(bytes(3000))
    says = judge_compiled_code(env).says
    assert f"{cache_root(env)}: 3.0 kB for 1 kind of" in says
    assert f"rm -r {cache_root(env)}" in says


def compiled_graphs(cache: str) -> dict[str, int]:
    """Train a model without kernels of its own, so that no C++ compiler runs; return what torch counted."""
    import torch
    from torch import nn
    from torch._dynamo.utils import counters

    import paceline
    from paceline.config import config_from_words

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(rows))

    os.environ["XDG_CACHE_HOME"] = cache
    words = ["compile=true", "device=cpu", "steps=1", "batch.lanes=1"]
    with paceline.Run(config_from_words(RunConfig, words)) as run:
        model = run.model(Twice())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps((torch.ones(16, 4),)):
            run.update(optimizer, lambda batch: model(batch[0]).mean(), step)
    found = counters["inductor"]
    return {kind: found[f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")}


def test_a_second_start_takes_compiled_code_from_the_cache(tmp_path: Path) -> None:
    given = {"cache": str(tmp_path / "cache")}
    [first] = run_on_processes(compiled_graphs, 1, tmp_path, {}, given)
    [again] = run_on_processes(compiled_graphs, 1, tmp_path, {}, given)
    assert (first["miss"] > 0, first["hit"]) == (True, 0)
    assert again == {"hit": first["miss"], "miss": 0}
