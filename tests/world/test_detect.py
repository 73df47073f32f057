"""Who a process is, from the variables of whatever started it."""

from pathlib import Path

import pytest

from paceline.errors import EnvironmentUnfit
from paceline.world.detect import detect_world
from paceline.world.hostlist import expand_hostlist
from paceline.world.world import FileRendezvous, PublishedRendezvous, TcpRendezvous

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "a", "MASTER_PORT": "5", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
# As srun of Slurm 22.05 sets them in task 3 of 2 nodes x 2.
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
ONE_NODE = {
    "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3",
}  # fmt: skip
SRUN_ONE_NODE = SRUN | ONE_NODE
# What the batch shell itself has: it is no rank.
SBATCH = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77",
    "SLURM_NNODES": "2",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PACELINE = {"PACELINE_MEETING": "/x/meeting", "RANK": "2", "WORLD_SIZE": "3"}
PACELINE_HOSTS = {
    "PACELINE_MEETING": "/x/meeting", "PACELINE_ADDRESS": "[::1]:9/2", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
UNEVEN = TORCHRUN | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
MPI_NODES = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "size", "local_rank", "local_size", "node", "nodes"),
    [
        ({}, "alone", 0, 1, 0, 1, 0, 1),
        (PACELINE, "paceline", 2, 3, 2, 3, 0, 1),
        (TORCHRUN, "torchrun", 3, 4, 1, 2, 1, 2),
        (UNEVEN, "torchrun", 3, 5, 1, 1, 1, 2),
        (PACELINE_HOSTS, "paceline", 3, 4, 1, 2, 1, 2),
        (BY_HAND, "torchrun", 1, 2, 0, 1, 1, 2),
        (SRUN, "slurm", 3, 4, 1, 2, 1, 2),
        (SRUN_ONE_NODE, "slurm", 3, 4, 3, 4, 0, 1),
        (SBATCH, "alone", 0, 1, 0, 1, 0, 1),
        (OPENMPI, "openmpi", 1, 2, 1, 2, 0, 1),
        (HYDRA, "pmi", 1, 2, 1, 2, 0, 1),
        (SBATCH | OPENMPI, "openmpi", 1, 2, 1, 2, 0, 1),
        (SRUN | TORCHRUN, "torchrun", 3, 4, 1, 2, 1, 2),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm", 3, 4, 1, 2, 1, 2),
        (SRUN | PACELINE, "paceline", 2, 3, 2, 3, 0, 1),
    ],
)
def test_each_launcher_is_known_by_its_variables(
    env, launcher, rank, size, local_rank, local_size, node, nodes
):
    world = detect_world(env)
    assert (world.launcher, world.rank, world.size) == (launcher, rank, size)
    local = (world.local_rank, world.local_size, world.node, world.nodes)
    assert local == (local_rank, local_size, node, nodes)


def published(key, host, *peers, serve=False):
    return PublishedRendezvous(key, host, peers, serve)


def tcp(host, port, prefix, *, serve=False):
    return TcpRendezvous(host, port, serve, prefix)


def in_file(path):
    return FileRendezvous(Path(path, "meeting"))


OWN_PORT, OTHER = SRUN | {"MASTER_PORT": "7"}, SRUN | {"MASTER_ADDR": "m", "MASTER_PORT": "7"}
IN_TMP = SRUN_ONE_NODE | {"TMPDIR": "/t"}
FIRST = {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
AGAIN = {"SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "3"}
BY_IB = {"PACELINE_HOST_SUFFIX": "-ib"}


@pytest.mark.parametrize(
    ("env", "meeting"),
    [
        ({}, None),
        (PACELINE, in_file("/x")),
        (IN_TMP, in_file("/t/paceline-slurm-77-0-0")),
        (IN_TMP | {"SLURM_STEP_LAUNCHER_PORT": "40123"}, in_file("/t/paceline-slurm-77-0-0-40123")),
        (IN_TMP | {"SLURM_RESTART_COUNT": "2"}, in_file("/t/paceline-slurm-77-0-2")),
        (OPENMPI | {"TMPDIR": "/t"}, in_file("/t/paceline-mpi-41")),
        (SRUN, published("slurm-77-0-0", "n2", "n1")),
        (SRUN | AGAIN, published("slurm-77-3-1", "n2", "n1")),
        (SRUN | FIRST, published("slurm-77-0-0", "n1", "n2", serve=True)),
        (SRUN | BY_IB | {"SLURMD_NODENAME": "n1"}, published("slurm-77-0-0", "n1-ib", "n2-ib")),
        (SRUN | {"MASTER_ADDR": "m"}, published("slurm-77-0-0", "m")),
        (OWN_PORT, tcp("n1", 7, "slurm-77-0-0")),
        (OWN_PORT | BY_IB, tcp("n1-ib", 7, "slurm-77-0-0")),
        (OTHER | {"SLURM_STEP_NODELIST": "n["}, tcp("m", 7, "slurm-77-0-0")),
        (OTHER, tcp("m", 7, "slurm-77-0-0")),
        (TORCHRUN, tcp("a", 5, "paceline-2")),
        (TORCHRUN | {"RANK": "0"}, tcp("a", 5, "paceline-2")),
        (BY_HAND | {"RANK": "0"}, tcp("h", 9, "paceline", serve=True)),
        (MPI_NODES | {"PMIX_NAMESPACE": "prterun-a-7@1"}, published("mpi-prterun-a-7_1", "")),
        (MPI_NODES | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}, tcp("h", 9, "mpi-")),
        (PACELINE_HOSTS, tcp("::1", 9, "paceline-2")),
        (PACELINE_HOSTS | {"RANK": "0"}, tcp("::1", 9, "paceline-2", serve=True)),
    ],
)
def test_one_node_meets_in_a_file_and_several_at_one_address(env, meeting):
    assert detect_world(env, parent=41).rendezvous == meeting


def test_what_else_is_handed_over():
    world = detect_world(PACELINE_HOSTS | {"PACELINE_INTERFACE": "ib0"})
    assert (world.interface, world.launcher_file) == ("ib0", Path("/x/meeting"))
    assert detect_world(TORCHRUN).launcher_file is None


@pytest.mark.parametrize(
    ("env", "fix"),
    [
        ({"RANK": "0"}, "paceline run"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "unset RANK"),
        (BY_HAND | {"RANK": "2"}, "do not export RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "export MASTER_ADDR"),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, "MASTER_ADDR"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "paceline run"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "paceline run"),
    ],
)
def test_variables_that_cannot_be_say_the_way_out(env, fix):
    with pytest.raises(EnvironmentUnfit, match=fix):
        detect_world(env)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3],login", ["r1n1", "r1n3", "r2n1", "r2n3", "login"]),
    ],
)
def test_node_lists_are_expanded(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "n[", "n[]", "n[2-1]", "n[a-b]", "n[1-999999999]", "n]1", "a,,b"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(EnvironmentUnfit, match="MASTER_ADDR"):
        expand_hostlist(text)
