"""A job is prepared for the right run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.container import Container
from paceline.cluster.profile import ClusterProfile
from paceline.cluster.slurm import run_command
from paceline.cluster.submission import SubmitRequest, prepare
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.launch.spec import module, script


def request(*words: str, **more: object) -> SubmitRequest:
    plan: dict = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1, "time": "5"} | more
    return SubmitRequest(module("toy", "paceline.recipes.toy"), words, ClusterProfile(), **plan)


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ([], "runs/toy"),
        (["name=a"], "runs/a"),
        (["--name", "b", "runs=other"], "other/b"),
        (["--runs=/scratch/me", "name=a b"], "/scratch/me/a b"),
        (["--config", "own.toml"], "elsewhere/from-file"),
        (["--config=own.toml", "name=word"], "elsewhere/word"),
    ],
)
def test_the_run_is_the_one_that_the_words_and_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text('name = "from-file"\nruns = "elsewhere"\nepochs = 3\n')
    assert prepare(request(*words), tmp_path).run.root == tmp_path / folder


@pytest.mark.parametrize(
    ("words", "more", "problem"),
    [
        (["name=a/b"], {}, "name="),
        (["name=.."], {}, "name="),
        (["name=a\nb"], {}, "control character"),
        (["checkpoint.to=s3://key:secret@bucket/x"], {}, "password"),
        ([], {"gpus_per_node": 2, "ranks_per_node": 3}, "3 .* got 2"),
        ([], {"jobs": 0}, "--jobs .* 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, words, more, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        prepare(request(*words, **more), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_interpreter_runs_the_copy_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text("x = 1\n")
    plain = request("a b", "--lr", "1")
    foreign = replace(plain, target=script(str(tmp_path / "any.py"), sys.executable))
    prepared = prepare(foreign, tmp_path)
    copy = str(prepared.code.folder / "code" / "any.py")
    assert prepared.job.words == ("python", sys.executable, copy, "a b", "--lr", "1")
    rank = f"-u -m paceline.launch.rank_srun python {sys.executable} {copy} 'a b' --lr 1\n"
    assert rank in prepared.script
    assert "\nforeign=yes\n" in prepared.script
    assert "\nforeign=\n" in prepare(plain, tmp_path).script
    image = replace(ClusterProfile(), container=Container("apptainer", "a.sif"))
    with pytest.raises(ConfigError, match="--python"):
        prepare(replace(foreign, profile=image), tmp_path)


def test_a_folder_for_errors_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    profile = ClusterProfile(options=("--error=logs/%j.err",))
    with pytest.raises(ConfigError, match=f"{tmp_path}/logs"):
        prepare(replace(request(), profile=profile), tmp_path)
    (tmp_path / "logs").mkdir()
    prepare(replace(request(), profile=profile), tmp_path)


def test_preparing_writes_nothing(tmp_path: Path) -> None:
    prepared = prepare(request("epochs=3"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert prepared.log == f"{tmp_path}/runs/toy/jobs/%j.log"
    assert prepare(request("name=50%j"), tmp_path).log.endswith("/runs/50%%j/jobs/%j.log")


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("Invalid account or account/partition combination specified", "--account"),
        ("invalid partition specified: nowhere", "--partition"),
        ("Invalid feature specification", "--constraint"),
        ("Requested node configuration is not available", "--gpus-per-node"),
    ],
)
def test_what_slurm_refuses_has_a_fix(tmp_path: Path, monkeypatch, said: str, option: str) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f"#!/bin/sh\necho 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EnvironmentUnfit, match=said) as caught:
        run_command("sbatch", "job.sh")
    assert option in caught.value.fix
