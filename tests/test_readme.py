"""Every command of the README does what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"```python\n(\"\"\".*?)```", README, re.DOTALL)[1]
COMMANDS = [line[2:].partition("#")[0].strip() for line in re.findall(r"^\$ .*", README, re.MULTILINE)]
NEEDS = {"make": "is how this test was started", "srun": "needs Slurm", "mpirun": "needs mpirun"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("readme")
    (place / "digits.py").write_text(SCRIPT)
    return place


def run(command: str, folder: Path) -> str:
    """Run a command as a reader types it, with this environment's programs first."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip
    done = subprocess.run(command.split(), cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_works(command, folder):
    program = command.split()[0]
    if program in NEEDS and (program == "make" or not shutil.which(program)):
        pytest.skip(f"{program} {NEEDS[program]}")
    said = run(command.replace("mpirun", "mpirun --oversubscribe"), folder)
    if "epochs=3" in command:
        with (folder / "digests").open("a") as file:
            file.write(re.search(r"optimizer state (\w{16})", said)[1] + "\n")


@pytest.mark.slow
def test_all_ways_to_start_the_script_gave_the_same_bits(folder):
    digests = (folder / "digests").read_text().split() if (folder / "digests").exists() else []
    if len(digests) < 2:
        pytest.skip("needs the commands above")
    assert len(set(digests)) == 1


def test_the_script_is_as_short_as_promised():
    body = re.search(r"def main.*?\n\n\n", SCRIPT, re.DOTALL)[0]
    assert len(body.strip().splitlines()) <= 12
