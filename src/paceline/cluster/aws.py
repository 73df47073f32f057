"""The choices that describe a cluster on AWS, each checked before AWS sees it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.cluster.aws_instances import KNOWN_INSTANCES, is_arm
from paceline.errors import ConfigError, did_you_mean

Storage = Literal["fsx-lustre", "efs", "ebs"]
Capacity = Literal["ondemand", "spot", "block"]
Efa = Literal["auto", "on", "off"]
System = Literal["ubuntu2404", "ubuntu2204", "alinux2023", "rhel9", "rhel8", "rocky9", "rocky8"]

DEFAULT_GIB: dict[Storage, int] = {"fsx-lustre": 1200, "efs": 0, "ebs": 500}
"""Size of the shared storage if the user gives none; EFS grows by itself."""

_REGION = r"[a-z]{2}(-[a-z]+){1,2}-[0-9]"
_SUBNET = r"subnet-([0-9a-f]{8}|[0-9a-f]{17})"
_RESERVATION = r"cr-([0-9a-f]{8}|[0-9a-f]{17})"
_INSTANCE = r"[a-z][a-z0-9-]*\.[a-z0-9-]+"
_KEY = r"[ -~]{1,255}"
_NAME = r"[A-Za-z][A-Za-z0-9-]{0,59}"


@dataclass(frozen=True)
class AwsCluster:
    """A cluster as its user describes it; everything else is derived."""

    nodes: int
    """Maximum number of compute nodes; there are none while no job is pending or running."""
    instance: str
    """Instance type of the compute nodes: p4d.24xlarge has 8 A100."""
    region: str
    subnet: str
    """Subnet of the compute nodes."""
    key: str
    """Name of the EC2 key pair for ssh to the head node."""
    head_subnet: str = ""
    """Subnet of the head node; empty: the subnet of the compute nodes."""
    head_instance: str = "m6i.xlarge"
    name: str = "paceline"
    system: System = "ubuntu2404"
    """Operating system; the default ships a recent enough Python."""
    storage: Storage = "fsx-lustre"
    size_gib: int = 0
    """Size of the shared storage; 0: the default of its kind."""
    keep_storage: bool = True
    """Whether the shared storage, with its runs, is kept when the cluster is deleted."""
    capacity: Capacity = "ondemand"
    reservation: str = ""
    """ID of the capacity reservation or capacity block that provides the nodes."""
    efa: Efa = "auto"
    """EFA, AWS's fast network; auto: on for instance types known to have it."""
    idle_min: int = 10
    """Minutes without a job after which a node is terminated."""
    ssh_from: str = ""
    """Network that may reach the head node by ssh, such as 203.0.113.7/32; empty: any."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_names()
        self._check_numbers()
        self._check_capacity()
        self._check_instances()

    @property
    def has_efa(self) -> bool:
        """Whether the compute nodes get EFA."""
        if self.efa == "auto":
            known = KNOWN_INSTANCES.get(self.instance)
            return known is not None and known.efa
        return self.efa == "on"

    def _check_choices(self) -> None:
        _check_choice("--storage", self.storage, get_args(Storage))
        _check_choice("--capacity", self.capacity, get_args(Capacity))
        _check_choice("--efa", self.efa, get_args(Efa))
        _check_choice("--os", self.system, get_args(System))

    def _check_names(self) -> None:
        subnets = f"`aws ec2 describe-subnets --region {self.region}` lists yours"
        keys = f"`aws ec2 describe-key-pairs --region {self.region}` lists yours"
        name_rule = "use letters, digits and -, a letter first, at most 60 characters"
        _check_format("--region", self.region, _REGION, "for example --region eu-west-1")
        _check_format("--subnet", self.subnet, _SUBNET, subnets)
        _check_format("--head-subnet", self.head_subnet or self.subnet, _SUBNET, subnets)
        _check_format("--key", self.key, _KEY, keys)
        for flag, kind in (("--instance", self.instance), ("--head-instance", self.head_instance)):
            _check_format(flag, kind, _INSTANCE, f"for example {flag} p4d.24xlarge")
        _check_format("--name", self.name, _NAME, name_rule)
        if self.reservation:
            reservations = "`aws ec2 describe-capacity-reservations` lists yours"
            _check_format("--reservation", self.reservation, _RESERVATION, reservations)
        if self.ssh_from:
            _check_network(self.ssh_from)

    def _check_numbers(self) -> None:
        if not 1 <= self.nodes <= 1000:
            raise ConfigError(
                f"--nodes must be between 1 and 1000, got {self.nodes}",
                fix="request 1 to 1000 nodes: --nodes 2",
            )
        if self.idle_min < 1:
            raise ConfigError(
                f"--idle must be at least 1 minute, got {self.idle_min}",
                fix="use 1 minute or more: --idle 10",
            )
        self._check_storage_size(self.size_gib or DEFAULT_GIB[self.storage])

    def _check_storage_size(self, size: int) -> None:
        if self.storage == "fsx-lustre" and size != 1200 and (size % 2400 or size < 2400):
            raise ConfigError(
                f"FSx for Lustre needs 1200 GiB or a multiple of 2400 GiB, got {size} GiB",
                fix="use --size 1200, 2400, 4800, 7200, ...",
            )
        if self.storage == "ebs" and not 1 <= size <= 16384:
            raise ConfigError(
                f"an EBS volume must have 1 to 16384 GiB, got {size} GiB",
                fix="use --size 1 to --size 16384",
            )
        if self.storage == "efs" and size:
            raise ConfigError(
                f"--size {size} does not apply to EFS, which grows by itself",
                fix="remove --size, or use --storage ebs",
            )

    def _check_capacity(self) -> None:
        if self.capacity == "block" and not self.reservation:
            raise ConfigError(
                "--capacity block needs the ID of the capacity block",
                fix="add --reservation cr-...",
            )
        if self.capacity == "spot" and self.reservation:
            raise ConfigError(
                "spot instances cannot come from a capacity reservation",
                fix="use --capacity ondemand, or remove --reservation",
            )
        if self.capacity == "spot" and self.instance.startswith("hpc"):
            raise ConfigError(
                f"{self.instance} is not available as a spot instance",
                fix="use --capacity ondemand",
            )

    def _check_instances(self) -> None:
        known = KNOWN_INSTANCES.get(self.instance)
        if self.efa == "on" and known is not None and not known.efa:
            raise ConfigError(
                f"{self.instance} has no EFA", fix="use a larger size, or remove --efa"
            )
        if is_arm(self.instance) != is_arm(self.head_instance):
            matching = "m7g.xlarge" if is_arm(self.instance) else "m6i.xlarge"
            raise ConfigError(
                f"the head node ({self.head_instance}) and the compute nodes ({self.instance}) "
                "have different CPU architectures",
                fix=f"use one architecture for both, they share one installation: "
                f"--head-instance {matching}",
            )


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {flag} {value!r}", fix=did_you_mean(value, choices))


def _check_format(flag: str, value: str, pattern: str, fix: str) -> None:
    if not value:
        raise ConfigError(f"{flag} is missing", fix=f"add {flag} NAME; {fix}")
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ConfigError(f"{flag} {value!r} is not valid", fix=fix)


def _check_network(text: str) -> None:
    try:
        ipaddress.IPv4Network(text)
    except ValueError as error:
        raise ConfigError(
            f"--ssh-from {text!r} is not an IPv4 network: {error}",
            fix="use a form such as 203.0.113.7/32",
        ) from error
    if "/" not in text:
        raise ConfigError(
            f"--ssh-from {text!r} has no prefix length", fix=f"use {text}/32 for one address"
        )
