"""Which cluster AWS is asked to build: a configuration for AWS ParallelCluster, and the commands that go with it."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from paceline.cluster.yaml_writer import Value, as_yaml
from paceline.errors import ConfigError, did_you_mean

Storage = Literal["fsx-lustre", "efs", "ebs"]
Capacity = Literal["ondemand", "spot", "block"]
Efa = Literal["auto", "on", "off"]
System = Literal["ubuntu2404", "ubuntu2204", "alinux2023", "rhel9", "rhel8", "rocky9", "rocky8"]

SHARED = "/shared"
QUEUE = "train"
"""The partition that the profile aws-parallelcluster names."""
"""Where every node sees the same files; runs go there."""

_USUAL_GIB: dict[Storage, int] = {"fsx-lustre": 1200, "efs": 0, "ebs": 500}
_CAPACITY_TYPE: dict[Capacity, str] = {
    "ondemand": "ONDEMAND",
    "spot": "SPOT",
    "block": "CAPACITY_BLOCK",
}


class Instance(NamedTuple):
    """What a kind of machine has."""

    gpus: int
    efa: bool


_SIZES = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge"), Instance(1, efa=False)),
    **dict.fromkeys(("8xlarge", "16xlarge"), Instance(1, efa=True)),
    **dict.fromkeys(("12xlarge", "24xlarge"), Instance(4, efa=True)),
    "48xlarge": Instance(8, efa=True),
}

KNOWN = {
    **dict.fromkeys(("p4d.24xlarge", "p4de.24xlarge"), Instance(8, efa=True)),
    **dict.fromkeys(("p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"), Instance(8, efa=True)),
    **dict.fromkeys(("p6-b200.48xlarge", "p6-b300.48xlarge"), Instance(8, efa=True)),
    "p5.4xlarge": Instance(1, efa=True),
    **{
        f"{family}.{size}": facts
        for family in ("g5", "g6", "g6e")
        for size, facts in _SIZES.items()
    },
    **dict.fromkeys(("g4dn.xlarge", "g4dn.2xlarge", "g4dn.4xlarge"), Instance(1, efa=False)),
    "g4dn.12xlarge": Instance(4, efa=True),
    "g4dn.metal": Instance(8, efa=True),
    **dict.fromkeys(
        ("c5n.9xlarge", "c5n.18xlarge", "c6in.32xlarge", "c7i.48xlarge"), Instance(0, efa=True)
    ),
    **dict.fromkeys(
        ("hpc6a.48xlarge", "hpc6id.32xlarge", "hpc7a.96xlarge", "hpc8a.96xlarge"),
        Instance(0, efa=True),
    ),
}
"""Machines of which we know the number of GPUs, and whether they have EFA, AWS's fast network."""


@dataclass(frozen=True)
class AwsCluster:
    """What a person decides about a cluster; the rest follows."""

    nodes: int
    """Most compute nodes at once; there are none while no job waits or runs."""
    instance: str
    """Their kind: p4d.24xlarge has 8 A100."""
    region: str
    subnet: str
    """The subnet of the compute nodes."""
    key: str
    """The name of the EC2 key pair that opens the head node by ssh."""
    head_subnet: str = ""
    """The subnet of the head node; empty: that of the compute nodes."""
    head_instance: str = "m6i.xlarge"
    name: str = "paceline"
    system: System = "ubuntu2404"
    """The operating system; this one brings a Python that is new enough."""
    storage: Storage = "fsx-lustre"
    size_gib: int = 0
    """Size of the shared storage; 0: the usual one of its kind."""
    keep_storage: bool = True
    """Whether the shared storage, with its runs, outlives the cluster."""
    capacity: Capacity = "ondemand"
    reservation: str = ""
    """The capacity reservation, or the capacity block, to take the nodes from."""
    efa: Efa = "auto"
    """AWS's fast network; auto: where it is known that the instance has it."""
    idle_min: int = 10
    """After how many minutes without a job a node is given back."""
    ssh_from: str = ""
    """The addresses that may reach the head node by ssh, as 203.0.113.7/32; empty: any."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_names()
        self._check_numbers()
        self._check_together()

    @property
    def has_efa(self) -> bool:
        """Whether the nodes get EFA."""
        known = KNOWN.get(self.instance)
        return self.efa == "on" or (self.efa == "auto" and known is not None and known.efa)

    def _check_choices(self) -> None:
        choices = {"--storage": Storage, "--capacity": Capacity, "--efa": Efa, "--os": System}
        given = {
            "--storage": self.storage,
            "--capacity": self.capacity,
            "--efa": self.efa,
            "--os": self.system,
        }
        for flag, word in given.items():
            if word not in get_args(choices[flag]):
                raise ConfigError(
                    f"{flag} {word!r} is not known", fix=did_you_mean(word, get_args(choices[flag]))
                )

    def _check_names(self) -> None:
        _match("--region", self.region, r"[a-z]{2}(-[a-z]+){1,2}-[0-9]", "as in --region eu-west-1")
        of = f"describe-subnets --region {self.region}"
        _match("--subnet", self.subnet, _id("subnet"), f"`aws ec2 {of}` lists yours")
        _match(
            "--head-subnet",
            self.head_subnet or self.subnet,
            _id("subnet"),
            f"`aws ec2 {of}` lists yours",
        )
        _match(
            "--key",
            self.key,
            r"[ -~]{1,255}",
            f"`aws ec2 describe-key-pairs --region {self.region}` lists yours",
        )
        for flag, kind in (("--instance", self.instance), ("--head-instance", self.head_instance)):
            _match(flag, kind, r"[a-z][a-z0-9-]*\.[a-z0-9-]+", f"as in {flag} p4d.24xlarge")
        _match(
            "--name",
            self.name,
            r"[A-Za-z][A-Za-z0-9-]{0,59}",
            "letters, digits and -, a letter first, at most 60",
        )
        if self.reservation:
            _match(
                "--reservation",
                self.reservation,
                _id("cr"),
                "`aws ec2 describe-capacity-reservations` lists yours",
            )
        if self.ssh_from:
            _check_network(self.ssh_from)

    def _check_numbers(self) -> None:
        if not 1 <= self.nodes <= 1000:
            raise ConfigError(f"--nodes {self.nodes} cannot be", fix="ask for 1 to 1000 nodes")
        if self.idle_min < 1:
            raise ConfigError(
                f"--idle {self.idle_min} min is too short", fix="give 1 minute or more"
            )
        size = self.size_gib or _USUAL_GIB[self.storage]
        if self.storage == "fsx-lustre" and size != 1200 and (size % 2400 or size < 2400):
            raise ConfigError(
                f"FSx for Lustre has no size of {size} GiB",
                fix="--size 1200, 2400, 4800, 7200 and so on",
            )
        if self.storage == "ebs" and not 1 <= size <= 16384:
            raise ConfigError(f"an EBS volume cannot have {size} GiB", fix="--size 1 to 16384")
        if self.storage == "efs" and size:
            raise ConfigError(
                "EFS grows by itself and has no size",
                fix="leave --size out, or choose --storage ebs",
            )

    def _check_together(self) -> None:
        if self.capacity == "block" and not self.reservation:
            raise ConfigError(
                "a capacity block is taken from its reservation",
                fix="name it: --reservation cr-...",
            )
        if self.capacity == "spot" and self.reservation:
            raise ConfigError(
                "spot machines are in no reservation",
                fix="--capacity ondemand, or no --reservation",
            )
        if self.capacity == "spot" and self.instance.startswith("hpc"):
            raise ConfigError(f"{self.instance} is not sold as spot", fix="--capacity ondemand")
        if self.efa == "on" and self.instance in KNOWN and not KNOWN[self.instance].efa:
            raise ConfigError(
                f"{self.instance} has no EFA", fix="take a larger size, or leave --efa out"
            )
        if is_arm(self.instance) != is_arm(self.head_instance):
            fitting = "m7g.xlarge" if is_arm(self.instance) else "m6i.xlarge"
            raise ConfigError(
                f"{self.head_instance} and {self.instance} are processors of two kinds",
                fix=f"one installation serves both kinds of node: --head-instance {fitting}",
            )


def is_arm(instance: str) -> bool:
    """Return whether an instance has AWS's own ARM processors: a g after the number says so.

    >>> [is_arm(kind) for kind in ("c7gn.16xlarge", "g5g.xlarge", "g5.xlarge", "p4d.24xlarge")]
    [True, True, False, False]
    """
    return bool(re.match(r"[a-z]+[0-9]+g", instance))


def configuration(cluster: AwsCluster) -> str:
    """Return the file that `pcluster create-cluster` reads.

    >>> text = configuration(AwsCluster(2, "p4d.24xlarge", "eu-west-1", "subnet-0123456789abcdef0", "me"))
    >>> text.splitlines()[:3]
    ['Region: "eu-west-1"', 'Image:', '  Os: "ubuntu2404"']
    """
    ssh: dict[str, Value] = {"KeyName": cluster.key}
    if cluster.ssh_from:
        ssh["AllowedIps"] = cluster.ssh_from
    return as_yaml(
        {
            "Region": cluster.region,
            "Image": {"Os": cluster.system},
            "HeadNode": {
                "InstanceType": cluster.head_instance,
                "Networking": {"SubnetId": cluster.head_subnet or cluster.subnet},
                "Ssh": ssh,
            },
            "Scheduling": {
                "Scheduler": "slurm",
                "ScalingStrategy": "all-or-nothing",  # half of a job's nodes would only cost
                "SlurmSettings": {
                    "ScaledownIdletime": cluster.idle_min,
                    "QueueUpdateStrategy": "DRAIN",
                },
                "SlurmQueues": [_queue(cluster)],
            },
            "SharedStorage": [_storage(cluster)],
        }
    )


def _queue(cluster: AwsCluster) -> dict[str, Value]:
    always = cluster.nodes if cluster.capacity == "block" else 0  # a block is paid for, used or not
    resource: dict[str, Value] = {
        "Name": "nodes",
        "InstanceType": cluster.instance,
        "MinCount": always,
        "MaxCount": cluster.nodes,
    }
    networking: dict[str, Value] = {
        "SubnetIds": [cluster.subnet]
    }  # one: EFA and Lustre stay in one zone
    if cluster.has_efa:
        resource["Efa"] = {"Enabled": True}
        if cluster.capacity != "block":
            networking["PlacementGroup"] = {
                "Enabled": not cluster.reservation
            }  # a reservation stands where it stands
    if cluster.reservation:
        resource["CapacityReservationTarget"] = {"CapacityReservationId": cluster.reservation}
    kind = _CAPACITY_TYPE[cluster.capacity]
    return {
        "Name": QUEUE,
        "CapacityType": kind,
        "Networking": networking,
        "ComputeResources": [resource],
    }


def _storage(cluster: AwsCluster) -> dict[str, Value]:
    size = cluster.size_gib or _USUAL_GIB[cluster.storage]
    after: dict[str, Value] = {"DeletionPolicy": "Retain" if cluster.keep_storage else "Delete"}
    lustre: dict[str, Value] = {
        "StorageCapacity": size,
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 125,
    }
    kinds: dict[Storage, tuple[str, dict[str, Value]]] = {
        "fsx-lustre": ("FsxLustre", {**lustre, **after}),
        "efs": ("Efs", {"Encrypted": True, **after}),
        "ebs": ("Ebs", {"VolumeType": "gp3", "Size": size, "Encrypted": True, **after}),
    }
    kind, settings = kinds[cluster.storage]
    return {"Name": "shared", "MountDir": SHARED, "StorageType": kind, f"{kind}Settings": settings}


def commands(cluster: AwsCluster, file: str) -> dict[str, str]:
    """Return what to type, by purpose, in the order of a cluster's life.

    >>> commands(AwsCluster(2, "p4d.24xlarge", "eu-west-1", "subnet-0123456789abcdef0", "me"), "a b.yaml")["create"]
    "pcluster create-cluster --cluster-name paceline --region eu-west-1 --cluster-configuration 'a b.yaml'"
    """
    this = f"--cluster-name {cluster.name} --region {cluster.region}"
    create = f"pcluster create-cluster {this} --cluster-configuration {shlex.quote(file)}"
    known = KNOWN.get(cluster.instance)
    per_node = f" --gpus-per-node {known.gpus if known else 'GPUS'}"
    submit = (
        f"paceline submit SCRIPT --cluster aws-parallelcluster --nodes {cluster.nodes}{per_node}"
    )
    return {
        "install": "pip install aws-parallelcluster",
        "check": f"{create} --dryrun true",
        "create": create,
        "follow": f"pcluster describe-cluster {this}",
        "enter": f"pcluster ssh {this}",
        "train": f"{submit} --time 02:00:00 runs={SHARED}/runs",
        "delete": f"pcluster delete-cluster {this}",
    }


def remarks(cluster: AwsCluster) -> list[str]:
    """Return what a person should know before AWS builds this."""
    found = []
    if cluster.efa == "auto" and cluster.instance not in KNOWN:
        found.append(
            f"whether {cluster.instance} has EFA is not known here, so it is off; --efa on turns it on"
        )
    if cluster.has_efa:
        found.append(
            f"with EFA a node has several network interfaces and no public address: {cluster.subnet} must be a private subnet with a way out (a NAT gateway)"
        )
        if cluster.head_subnet in {"", cluster.subnet}:
            found.append(
                "the head node is in that subnet, too; --head-subnet puts it where your ssh can reach it"
            )
    if not cluster.ssh_from:
        found.append(
            "any address may try ssh on the head node; --ssh-from 203.0.113.7/32 lets only yours"
        )
    if cluster.keep_storage:
        found.append(
            f"{SHARED} outlives the cluster, and costs until you delete it; --delete-storage deletes it, too"
        )
    else:
        found.append(f"deleting the cluster deletes {SHARED} and every run in it")
    return found


def _id(kind: str) -> str:
    return rf"{kind}-([0-9a-f]{{8}}|[0-9a-f]{{17}})"


def _match(flag: str, word: str, pattern: str, fix: str) -> None:
    """Refuse a word that AWS would not know; what is missing is asked for, never made up."""
    if not word:
        raise ConfigError(f"{flag} is missing", fix=f"{flag} NAME; {fix}")
    if not re.fullmatch(pattern, word, re.ASCII):
        raise ConfigError(f"{flag} {word!r} cannot be", fix=fix)


def _check_network(text: str) -> None:
    try:
        ipaddress.IPv4Network(text)
    except ValueError as error:
        raise ConfigError(
            f"--ssh-from {text!r} is not a network: {error}", fix="as in 203.0.113.7/32"
        ) from error
    if "/" not in text:
        raise ConfigError(f"--ssh-from {text!r} has no size", fix=f"{text}/32 is that one address")
