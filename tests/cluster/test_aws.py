"""Clusters on AWS: the configuration file, refused values, and the validation by ParallelCluster."""

import gzip
import json
import os
import stat
import string
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import _dispatch as dispatch
from paceline.cluster.aws import AwsCluster
from paceline.cluster.aws_instances import KNOWN_INSTANCES, is_arm
from paceline.cluster.parallelcluster import QUEUE, commands, configuration, notes
from paceline.cluster.profile import load_profile
from paceline.cluster.yaml_writer import as_yaml
from paceline.errors import ConfigError, EnvironmentUnfit

HERE = Path(__file__).parent
SUBNET = "subnet-0123456789abcdef0"
HEAD_SUBNET = "subnet-0fedcba9876543210"
P4D = AwsCluster(
    2, "p4d.24xlarge", "eu-west-1", SUBNET, "me", head_subnet=HEAD_SUBNET, ssh_from="203.0.113.7/32"
)
RESERVED = "cr-0123456789abcdef0"

CLUSTERS = {
    "p4d": P4D,
    "p5, efs": replace(P4D, nodes=4, instance="p5.48xlarge", region="us-east-1", storage="efs"),
    "p5en in a reservation": replace(
        P4D, instance="p5en.48xlarge", region="us-east-1", reservation=RESERVED
    ),
    "p5 in a block": replace(
        P4D, instance="p5.48xlarge", region="us-east-1", capacity="block", reservation=RESERVED
    ),
    "c5n, ebs": replace(
        P4D, instance="c5n.18xlarge", storage="ebs", size_gib=100, keep_storage=False
    ),
    "g5, spot, lustre": replace(
        P4D, instance="g5.48xlarge", capacity="spot", size_gib=4800, ssh_from=""
    ),
    "g6 without EFA": replace(
        P4D, nodes=1, instance="g6.xlarge", head_subnet="", storage="ebs", idle_min=1
    ),
    "unknown here, with EFA": replace(P4D, instance="m7i.48xlarge", efa="on"),
    "another system": replace(P4D, system="alinux2023", name="A-b-1"),
}


def read(cluster):
    return yaml.safe_load(configuration(cluster))


def queue_of(cluster):
    return read(cluster)["Scheduling"]["SlurmQueues"][0]


def test_the_configuration_is_the_stored_one():
    assert configuration(P4D) == (HERE / "aws-p4d.yaml").read_text()


@pytest.mark.parametrize(
    ("instance", "asked", "efa"),
    [
        ("p4d.24xlarge", "auto", True),
        ("p4d.24xlarge", "off", False),
        ("g5.xlarge", "auto", False),
        ("x9z.metal", "auto", False),
        ("x9z.metal", "on", True),
    ],
)
def test_efa_is_on_where_it_is_known_or_asked_for(instance, asked, efa):
    queue = queue_of(replace(P4D, instance=instance, efa=asked))
    assert ("Efa" in queue["ComputeResources"][0]) is efa
    assert ("PlacementGroup" in queue["Networking"]) is efa


def test_nodes_come_when_a_job_waits_and_those_of_a_reservation_stand_where_they_stand():
    (nodes,) = queue_of(P4D)["ComputeResources"]
    assert (nodes["MinCount"], nodes["MaxCount"]) == (0, 2)
    assert read(replace(P4D, idle_min=3))["Scheduling"]["SlurmSettings"]["ScaledownIdletime"] == 3
    for instance, unknown in (("x9z.metal", True), (P4D.instance, False)):
        said = "\n".join(notes(replace(P4D, instance=instance)))
        assert (f"not known whether {instance}" in said) == unknown
    reserved = queue_of(CLUSTERS["p5en in a reservation"])
    (nodes,) = reserved["ComputeResources"]
    assert reserved["Networking"]["PlacementGroup"] == {"Enabled": False}
    assert nodes["CapacityReservationTarget"] == {"CapacityReservationId": RESERVED}
    block = queue_of(CLUSTERS["p5 in a block"])
    kind, count = block["CapacityType"], block["ComputeResources"][0]["MinCount"]
    assert (kind, count) == ("CAPACITY_BLOCK", 2)
    assert "PlacementGroup" not in block["Networking"]


@pytest.mark.parametrize("storage", ["fsx-lustre", "efs", "ebs"])
def test_runs_outlive_the_cluster_unless_it_is_said_otherwise(storage):
    for keep, policy in ((True, "Retain"), (False, "Delete")):
        (shared,) = read(replace(P4D, storage=storage, keep_storage=keep))["SharedStorage"]
        settings = shared[f"{shared['StorageType']}Settings"]
        assert (shared["MountDir"], settings["DeletionPolicy"]) == ("/shared", policy)


REFUSED = {
    "1 to 1000": [{"nodes": 0}],
    "--region": [{"region": ""}],
    "eu-west-1": [{"region": "Ireland"}],
    "describe-subnets": [
        {"subnet": ""},
        {"subnet": "subnet-x"},
        {"subnet": f"{SUBNET}\n"},
        {"head_subnet": "subnet-1 ; id"},
    ],
    "describe-key-pairs": [{"key": ""}, {"key": "schlüssel"}, {"key": "a\nb"}],
    "--instance": [{"instance": ""}],
    "p4d.24xlarge": [{"instance": "p4d"}],
    "--head-instance": [{"head_instance": "$(id)"}],
    "--head-instance m6i.xlarge": [{"head_instance": "m7g.xlarge"}],
    "--head-instance m7g.xlarge": [{"instance": "c7gn.16xlarge"}],
    "a letter first": [{"name": "1st"}],
    "at most 60": [{"name": "a" * 61}],
    "letters": [{"name": "a;id"}],
    "did you mean ubuntu2": [{"system": "ubuntu2304"}],
    "did you mean fsx-lustre": [{"storage": "lustre"}],
    "did you mean ondemand": [{"capacity": "on-demand"}],
    "use one of": [{"efa": "yes"}],
    "2400": [{"size_gib": 1000}, {"size_gib": -2400}],
    "remove --size": [{"storage": "efs", "size_gib": 10}],
    "16384": [{"storage": "ebs", "size_gib": 20000}],
    "1 minute": [{"idle_min": 0}],
    "describe-capacity-reservations": [{"reservation": "cr-1"}],
    "--reservation": [{"capacity": "block"}],
    "--capacity ondemand": [
        {"capacity": "spot", "reservation": RESERVED},
        {"capacity": "spot", "instance": "hpc6a.48xlarge"},
    ],
    "larger size": [{"instance": "g5.xlarge", "efa": "on"}],
    "203.0.113.7/32": [{"ssh_from": "203.0.113.7"}],
    "/32": [{"ssh_from": "everyone"}],
}


@pytest.mark.parametrize(("fix", "changes"), REFUSED.items(), ids=REFUSED)
def test_what_aws_would_not_take_is_refused_with_a_fix(fix, changes):
    for change in changes:
        with pytest.raises(ConfigError) as caught:
            replace(P4D, **change)
        assert fix in caught.value.fix, change


TREES = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(
            st.text(string.ascii_letters, min_size=1).map(lambda key: f"K{key}"), inner, min_size=1
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["Region", "Image", "Ssh"]), TREES, min_size=1))
def test_yaml_brings_back_exactly_what_was_written(tree):
    assert yaml.safe_load(as_yaml(tree)) == tree


@given(st.text())
def test_a_key_is_written_exactly_or_refused(key):
    try:
        cluster = replace(P4D, key=key)
    except ConfigError:
        return
    assert read(cluster)["HeadNode"]["Ssh"] == {"KeyName": key, "AllowedIps": "203.0.113.7/32"}
    assert len(configuration(cluster).splitlines()) == len(configuration(P4D).splitlines())


def test_the_table_of_instances_is_what_aws_publishes():
    moto = pytest.importorskip(
        "moto", reason="moto carries a copy of what AWS says of its instances"
    )
    packed = Path(moto.__file__).parent / "ec2/resources/instance_types.json.gz"
    facts = json.loads(gzip.decompress(packed.read_bytes()))
    for name, ours in KNOWN_INSTANCES.items():
        theirs = facts[name]
        gpus = sum(gpu["Count"] for gpu in theirs.get("GpuInfo", {}).get("Gpus", []))
        assert (ours.gpus, ours.efa) == (gpus, theirs["NetworkInfo"]["EfaSupported"]), name
    wrong = {
        name
        for name, theirs in facts.items()
        if is_arm(name) != ("arm64" in theirs["ProcessorInfo"]["SupportedArchitectures"])
    }
    assert all(name.startswith(("a1.", "mac", "p6e-gb")) for name in wrong), wrong


def test_commands_name_this_cluster_and_quote_the_file():
    said = commands(replace(P4D, name="Mine"), "$(id) 'x'.yaml")
    assert list(said) == ["install", "check", "create", "follow", "enter", "train", "delete"]
    for purpose in ("check", "create", "follow", "enter", "delete"):
        assert "--cluster-name Mine --region eu-west-1" in said[purpose]
    assert "--cluster-configuration '$(id) '\"'\"'x'\"'\"'.yaml'" in said["create"]
    assert "--nodes 2 --gpus-per-node 8 " in said["train"]
    assert "--gpus-per-node 0 " in commands(CLUSTERS["c5n, ebs"], "x")["train"]
    assert load_profile("aws-parallelcluster", Path("/nowhere")).partition == QUEUE


def run(*words):
    return dispatch(["cluster", *words])


GIVEN = (
    f"aws --nodes 2 --instance p4d.24xlarge --region eu-west-1 --subnet {SUBNET} --key me".split()
)


def test_the_verb_writes_a_private_file_and_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*GIVEN, "--print") == 0
    assert yaml.safe_load(capsys.readouterr().out)["Region"] == "eu-west-1"
    assert not list(tmp_path.iterdir())
    more = ["--head-subnet", HEAD_SUBNET, "--ssh-from", "203.0.113.7/32", "--out", "mine.yaml"]
    assert run(*GIVEN, *more) == 0
    out = tmp_path / "mine.yaml"
    assert out.read_text() == (HERE / "aws-p4d.yaml").read_text()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    said = capsys.readouterr().out
    assert all(word in said for word in ("create-cluster", "delete-cluster", "paceline submit"))
    out.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        run(*GIVEN, *more)
    assert out.read_text() == "mine"
    assert run(*GIVEN, *more, "--force") == 0
    with pytest.raises(EnvironmentUnfit, match="--out"):
        run(*GIVEN, "--out", str(tmp_path / "no" / "folder.yaml"))


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "see `paceline cluster --help`"),
        (("aws",), "--region"),
        (GIVEN[:-2], "describe-key-pairs"),
        ((*GIVEN, "--subnett", "x"), "did you mean --subnet?"),
        ((*GIVEN, "extra"), "paceline cluster aws [options]"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_fix(words, fix):
    with pytest.raises(ConfigError) as caught:
        run(*words)
    assert fix in caught.value.fix


@pytest.fixture(scope="module")
def parallelcluster():
    python = os.environ.get("PACELINE_PCLUSTER")
    if not python:
        pytest.skip(
            "needs PACELINE_PCLUSTER=ENV/bin/python, of an environment made by `python3 -m venv ENV; ENV/bin/pip install aws-parallelcluster 'moto[ec2]'`"
        )

    def ask(texts):
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        done = subprocess.run(
            [python, HERE.parent / "support" / "pcluster_schema.py"],
            input=json.dumps(texts),
            capture_output=True,
            text=True,
            env=own,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


@pytest.mark.slow
def test_parallelcluster_accepts_every_kind_of_cluster_and_refuses_a_wrong_one(parallelcluster):
    text = configuration(P4D)
    texts = {name: configuration(cluster) for name, cluster in CLUSTERS.items()}
    wrong = {"key": ("KeyName", "KeyNam"), "os": ("ubuntu2404", "ubuntu1204")}
    said = parallelcluster(texts | {name: text.replace(*pair) for name, pair in wrong.items()})
    assert "Unknown field" in said.pop("key")[0]
    assert "ubuntu2404" in said.pop("os")[0]
    assert said == {key: [] for key in CLUSTERS}
