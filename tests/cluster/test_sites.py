"""Does the profile of each computing centre name its source, and request what the documentation there asks for?"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.cluster.batch import BatchJob, batch_script
from paceline.cluster.profile import READY, load_profile
from paceline.doctor.mistakes import find_mistakes

STORED = {"aws-parallelcluster", "generic", "gres", "perlmutter"}
"""Those of which test_batch.py compares the whole script."""
SITES = {
    "clariden": {"--partition=normal", "--gpus-per-node=4", "--cpus-per-task=72"},
    "daint": {"--partition=normal", "--gpus-per-node=4", "--cpus-per-task=72"},
    "frontier": {"--partition=batch", "--gpus-per-node=8", "--cpus-per-task=7"},
    "karolina": {"--partition=qgpu", "--gpus-per-node=8", "--cpus-per-task=16"},
    "leonardo": {"--partition=boost_usr_prod", "--gpus-per-node=4", "--cpus-per-task=8"},
    "lumi": {"--partition=standard-g", "--gpus-per-node=8", "--cpus-per-task=7"},
    "marenostrum5": {"--gres=gpu:4", "--cpus-per-task=20"},
}


def test_every_ready_profile_is_tested() -> None:
    assert {file.stem for file in READY.glob("*.toml")} == STORED | SITES.keys()


@pytest.mark.parametrize("name", SITES)
def test_a_profile_of_a_site_gives_a_script_without_mistakes(name: str, tmp_path: Path) -> None:
    first, second, *_ = (READY / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    assert (first.endswith("Not tried there."), second.startswith("# Source: ")) == (True, True)
    (tmp_path / "mine.toml").write_text(f'like = "{name}"\naccount = "p1234"\n')
    profile = load_profile("mine", tmp_path)
    gpus = profile.gpus_per_node
    job = BatchJob(
        words=("path", "/home/me/train.py"), run=Path("/home/me/runs/one"), folder=Path("/home/me"),
        python="/home/me/venv/bin/python", nodes=2, ranks_per_node=gpus, gpus_per_node=gpus,
        time="02:00:00", user="1000:1000",
    )  # fmt: skip
    script = batch_script(job, profile)
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line}
    assert options >= SITES[name] | {"--account=p1234", f"--ntasks-per-node={gpus}"}
    for variable, _ in profile.environment:
        assert f"export {variable}=" in script
    assert find_mistakes(script) == []
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
