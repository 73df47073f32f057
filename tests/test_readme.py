"""Every command of the README does what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch.program import paceline
from slurm.private import cluster_or_skip, wanted

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"```python\n(\"\"\".*?)```", README, re.DOTALL)[1]
COMMANDS = [line[2:].partition("#")[0].strip() for line in re.findall(r"^\$ .*", README, re.MULTILINE)]
NEEDS = {"make": "is how this test was started", "mpirun": "needs mpirun"}
OF_MANY_RANKS = ("paceline train mnist", "paceline verify", "paceline chaos", "paceline run digits.py -n 3")
ON_A_CLUSTER = ("srun", "paceline submit", "paceline watch", "paceline jobs", "paceline cancel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("readme")
    (place / "digits.py").write_text(SCRIPT)
    return place


@pytest.fixture(scope="module")
def cluster():
    with cluster_or_skip(wanted(nodes=2, cpus=4, gpus=2)) as slurm:
        yield slurm


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a reader, with this environment's programs first."""
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return path | root | {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}


def run(command: str, folder: Path) -> str:
    """Run a command as a reader types it; those that start ranks again and again need not import torch each time."""
    if command.startswith(OF_MANY_RANKS):
        done = paceline(*command.split()[1:], folder=folder, env=environment(folder))
        assert done.code == 0, done.out + done.err
        return done.out
    env = os.environ | environment(folder)
    done = subprocess.run(command.split(), cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def note_digest(command: str, said: str, folder: Path) -> None:
    if "epochs=3" in command and (found := re.search(r"optimizer state (\w{16})", said)):
        with (folder / "digests").open("a") as file:
            file.write(found[1] + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith(ON_A_CLUSTER)])
def test_a_command_of_the_readme_works(command, folder):
    program = command.split()[0]
    if program in NEEDS and (program == "make" or not shutil.which(program)):
        pytest.skip(f"{program} {NEEDS[program]}")
    said = run(command.replace("mpirun", "mpirun --oversubscribe"), folder)
    note_digest(command, said, folder)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(ON_A_CLUSTER)])
def test_a_command_of_the_readme_works_on_a_cluster(command, folder, cluster):
    done = cluster.run(command.split(), folder=folder, env=environment(folder), timeout_s=120)
    assert done.code == 0, done.out + done.err
    note_digest(command, done.out, folder)


@pytest.mark.slow
def test_all_ways_to_start_the_script_gave_the_same_bits(folder):
    digests = (folder / "digests").read_text().split() if (folder / "digests").exists() else []
    if len(digests) < 2:
        pytest.skip("needs the commands above")
    assert len(set(digests)) == 1


def test_the_script_is_as_short_as_promised():
    body = re.search(r"def main.*?\n\n\n", SCRIPT, re.DOTALL)[0]
    assert len(body.strip().splitlines()) <= 12
