"""A batch script carries every argument exactly, and is the text that was reviewed."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.batch import BatchJob, batch_script, sbatch_options
from paceline.cluster.profile import ClusterProfile, load_profile
from paceline.errors import ConfigError

EXPECTED = Path(__file__).with_name("expected")
JOB = BatchJob(
    words=("path", "/home/me/runs/digits/code/0123456789ab/code/digits.py", "epochs=3"),
    run=Path("/home/me/runs/digits"),
    folder=Path("/home/me"),
    python="/home/me/venv/bin/python",
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
    time="02:00:00",
    user="1000:1000",
)
ODD = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a\nb",
    "'",
    '"',
    "\\",
    "a b",
    "-n",
    "--",
]
ODD += ["*", "ü 漢字", "!!", "#", "&", "~", "${IFS}", "\x1b[2J", ")"]
NASTY = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=30
) | st.sampled_from(ODD)


def said_by_shell(script: str, words: str, folder: Path | None = None) -> str:
    """Return what bash prints that has read the part of a script which is the job's own."""
    head = script.partition("# ---- the same for every job")[0]
    command = ["bash", "-c", f"{head}\nprintf {words}"]
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        command, capture_output=True, check=True, cwd=folder, env=env
    ).stdout.decode()


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("name", ["aws-parallelcluster", "generic", "gres", "perlmutter"])
def test_the_script_of_a_ready_profile_is_the_stored_text(
    name: str, launcher: str, tmp_path: Path
) -> None:
    profile = replace(load_profile(name, tmp_path), account="m1234", launcher=launcher)
    text = batch_script(replace(JOB, gpus_per_node=profile.gpus_per_node or 4), profile)
    stored = EXPECTED / f"{name}-{launcher}.sh"
    if "PACELINE_STORE" in os.environ:  # after a change that was meant: look at the difference
        stored.write_text(text)
    assert text == stored.read_text()
    subprocess.run(["bash", "-n", stored], check=True)


@settings(max_examples=60)
@given(st.lists(NASTY, max_size=5), NASTY)
def test_every_word_reaches_the_command_exactly_and_none_is_executed(
    tmp_path_factory, words: list[str], name: str
) -> None:
    folder = tmp_path_factory.mktemp("shell")
    try:
        job = replace(
            JOB,
            words=("path", f"/code/{name}.py", *words),
            run=Path("/runs") / (name.replace("/", "_") or "x"),
        )
    except ConfigError:
        return
    script = batch_script(job, ClusterProfile())
    found = said_by_shell(script, "'%s\\0' \"${command[@]}\"", folder).split("\0")[:-1]
    assert found[found.index("path") :] == ["path", f"/code/{name}.py", *words]
    assert list(folder.iterdir()) == []


@settings(max_examples=60)
@given(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), NASTY)
def test_every_variable_reaches_the_ranks_exactly_or_is_refused(
    tmp_path_factory, name: str, value: str
) -> None:
    folder = tmp_path_factory.mktemp("shell")
    try:
        profile = ClusterProfile(environment=((f"X_{name}", value),))
    except ConfigError:
        return
    assert said_by_shell(batch_script(JOB, profile), f'%s "$X_{name}"', folder) == value
    assert list(folder.iterdir()) == []


@settings(max_examples=100)
@given(NASTY)
def test_no_word_gets_into_an_sbatch_line_unless_it_is_plain(word: str) -> None:
    try:
        profile = ClusterProfile(account=word, options=(f"--comment={word}",))
    except ConfigError:
        return
    lines = [f"#SBATCH {option}" for option in sbatch_options(JOB, profile)]
    assert all(len(line.split()) == 2 and line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *(({"time": time}, "time") for time in ("soon", "1:00\n#SBATCH --x")),
        *(({name: 0}, "at least 1, got 0") for name in ("nodes", "ranks_per_node")),
        ({"gpus_per_node": -1}, "at least 0, got -1"),
        ({"run": Path("/runs/a\nb")}, "control character"),
        ({"run": Path("/runs/a\\b")}, "backslash"),
        ({"words": ("path", "a\0b")}, "zero byte"),
        ({"words": ("path", "\udcff")}, "UTF-8"),
    ],
)
def test_what_slurm_or_a_shell_could_not_take_is_refused(change: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(JOB, **change)


def test_one_process_per_gpu_whichever_school() -> None:
    by_srun = sbatch_options(JOB, ClusterProfile(cpus_per_rank=8))
    assert {"--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8"} <= set(by_srun)
    agents = sbatch_options(JOB, ClusterProfile(cpus_per_rank=8, launcher="torchrun"))
    assert {"--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=32"} <= set(agents)
    script = batch_script(JOB, ClusterProfile(launcher="torchrun"))
    assert "--ntasks=2 " in script
    assert "paceline.launch.agent_main 4 path" in script


def test_the_script_names_the_run_and_no_rank() -> None:
    script = batch_script(JOB, ClusterProfile())
    settings = json.loads(said_by_shell(script, '%s "$PACELINE_SET"'))
    assert settings == {"name": "digits", "runs": "/home/me/runs"}
    assert "export RANK" not in script
    assert "MASTER_PORT=" not in script


def test_modules_venv_and_conda_come_before_the_command() -> None:
    script = batch_script(JOB, ClusterProfile(modules=("python/3.12", "a b"), venv="/v e"))
    assert (
        "surroundings() {\n  module load python/3.12 'a b'\n  source '/v e/bin/activate'\n}\ncommand=("
        in script
    )
    assert " python -u -m paceline.launch.rank_srun" in script
    assert "conda activate env\n" in batch_script(JOB, ClusterProfile(conda="env"))
