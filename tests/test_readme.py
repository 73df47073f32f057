"""Every command of the README does what it says."""

import re

import pytest

from support.private_cluster import cluster_or_skip, wanted
from support.typed_pages import (
    ROOT,
    environment,
    furnish,
    look_at,
    page_of,
    readme_script,
    skip_what_is_not_here,
    type_here,
)

PAGE = page_of(ROOT / "README.md")
HERE = [turn for turn in PAGE.turns if not turn[0].on_a_cluster]
ON_A_CLUSTER = [turn[0] for turn in PAGE.turns if turn[0].on_a_cluster]
WARM = (
    "paceline train mnist",
    "paceline verify",
    "paceline chaos",
    "paceline run -n 3 digits.py",
)  # many ranks, often


def words_of(turn):
    return (turn[0].host and f"{turn[0].host}$ {turn[0].words}") or turn[0].words


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
@pytest.mark.parametrize("turn", HERE, ids=words_of)
def test_a_command_of_the_readme_works(turn, folder, bits, tmp_path):
    skip_what_is_not_here(turn[0])
    where = furnish(tmp_path / "hosts", PAGE) if turn[0].host else folder
    check(
        turn[-1],
        type_here(turn, where, cold=not (turn[0].host or turn[0].words.startswith(WARM))),
        bits,
    )


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


def test_the_script_is_as_short_as_promised():
    body = re.search(r"def main.*?\n\n\n", readme_script(), re.DOTALL)[0]
    assert len(body.strip().splitlines()) <= 12
