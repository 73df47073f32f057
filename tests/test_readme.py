"""Every command of the README does what it says."""

import json
import re
import subprocess
import sys

import pytest

from support.private_cluster import cluster_or_skip, wanted
from support.program import started
from support.typed_pages import (
    ROOT,
    environment,
    furnish,
    look_at,
    page_of,
    skip_what_is_not_here,
    type_here,
)

PAGE = page_of(ROOT / "README.md")
ON_A_CLUSTER = [turn[0] for turn in PAGE.turns if turn[0].on_a_cluster]
WARM = (
    "paceline train mnist",
    "paceline verify",
    "paceline chaos",
    "paceline run -n 3 digits.py",
)  # many ranks, often


def words_of(turn):
    return (turn[0].host and f"{turn[0].host}$ {turn[0].words}") or turn[0].words


LONG = ("paceline train mnist -n 2",)  # the quickstart types it with fewer epochs
HERE = [
    pytest.param(turn, id=words, marks=[pytest.mark.heavy] * (words in LONG))
    for words, turn in {
        words_of(turn): turn for turn in PAGE.turns if not turn[0].on_a_cluster
    }.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("readme"), PAGE)


@pytest.fixture(scope="module")
def bits():
    """The digests that the page shows, and those of runs of three epochs."""
    return {"named": {}, "of three epochs": []}


@pytest.fixture(scope="module")
def cluster():
    with cluster_or_skip(wanted(nodes=2, cpus=4, gpus=2)) as slurm:
        yield slurm


def check(command, done, bits):
    look_at(done, command.shown, bits["named"])
    if "epochs=3" in command.words:
        bits["of three epochs"] += re.findall(r"optimizer state (\w{16})", done.out)


@pytest.mark.slow
@pytest.mark.parametrize("turn", HERE)
def test_a_command_of_the_readme_works(turn, folder, bits, tmp_path):
    skip_what_is_not_here(turn[0])
    where = furnish(tmp_path / "hosts", PAGE) if turn[0].host else folder
    cold = not (turn[0].host or turn[0].words.startswith(WARM))
    check(turn[-1], type_here(turn, where, cold=cold), bits)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("command", ON_A_CLUSTER, ids=lambda command: command.words)
def test_a_command_of_the_readme_works_on_a_cluster(command, folder, cluster, bits):
    done = cluster.run(command.words.split(), folder=folder, env=environment(folder), timeout_s=120)
    command.check_end(done)
    check(command, done, bits)


@pytest.mark.slow
def test_all_ways_to_start_the_script_gave_the_same_bits(bits):
    if len(bits["of three epochs"]) < 2:
        pytest.skip("needs the commands above")
    assert len(set(bits["of three epochs"])) == 1


def test_the_difference_turns_a_plain_script_into_one_with_the_same_bits_on_two_ranks(tmp_path):
    lines = re.search(r"```diff\n(.*?)```", PAGE.text, re.DOTALL)[1].splitlines()
    for name, kept in (("plain.py", " -"), ("changed.py", " +")):
        text = "\n".join(line[1:] for line in lines if not line or line[0] in kept)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "plain.py"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (plain.returncode, plain.stderr) == (0, "")
    digests = []
    for ranks in ("1", "2"):
        words = ("run", "-n", ranks, "changed.py", f"name=on{ranks}")
        with started(*words, folder=tmp_path) as running:
            done = running.wait()
        assert done.code == 0, done.err
        digests += re.findall(r"optimizer state (\w{16})", done.out)
    assert len(digests) == 2 and len(set(digests)) == 1


def test_the_terminal_of_the_picture_ends_with_the_bits_of_one_process():
    lines = json.loads((ROOT / "docs" / "images" / "terminal.json").read_text())
    ends = [line.split()[-1] for line in lines if line.startswith("done:")]
    assert len(ends) == 2 and len(set(ends)) == 1
    assert sum(line.startswith("restarting on 4 ranks") for line in lines) == 1
