"""`paceline cluster aws`: write the configuration of a Slurm cluster on AWS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.aws import (
    AwsCluster,
    Capacity,
    Efa,
    Storage,
    System,
)
from paceline.cluster.aws_instances import KNOWN_INSTANCES
from paceline.cluster.parallelcluster import commands, configuration, notes
from paceline.config.arguments import flag, option
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.rundir import write_whole


@dataclass(frozen=True, kw_only=True)
class AwsArguments:
    """The cluster has Slurm, EFA and shared storage. This only writes a file: nothing is created, and nothing costs money yet."""

    nodes: int = option(0, metavar="N")
    """Largest number of compute nodes; must be given. Nodes run only while jobs need them."""
    instance: str = option("", metavar="TYPE")
    """Instance type of the compute nodes, such as p4d.24xlarge (8 A100); must be given."""
    region: str = option("", metavar="REGION")
    """AWS region, such as eu-west-1; must be given."""
    subnet: str = option("", metavar="SUBNET")
    """Subnet of the compute nodes; must be given. With EFA it must be private."""
    key: str = option("", metavar="NAME")
    """EC2 key pair for ssh to the head node; must be given."""
    head_subnet: str = option("", metavar="SUBNET")
    """Subnet of the head node (default: the same)."""
    head_instance: str = option("m6i.xlarge", metavar="TYPE")
    """Instance type of the head node."""
    name: str = option("paceline", metavar="NAME")
    """Name of the cluster."""
    system: System = option("ubuntu2404", "--os", metavar="OS")
    """Operating system; ubuntu2404 has Python 3.12."""
    storage: Storage = "fsx-lustre"
    """Shared storage at /shared."""
    size: int = option(0, metavar="GIB")
    """Size of the storage in GiB (default: 1200 for fsx-lustre, 500 for ebs)."""
    delete_storage: bool = False
    """Delete the storage and its runs together with the cluster."""
    capacity: Capacity = "ondemand"
    """Purchase option of the compute nodes."""
    reservation: str = option("", metavar="ID")
    """Capacity reservation or capacity block of the nodes."""
    efa: Efa = "auto"
    """Elastic Fabric Adapter, the fast network; auto: if the instance type is known to have it."""
    idle: int = option(10, metavar="MINUTES")
    """Release a node after this many idle minutes."""
    ssh_from: str = option("", metavar="NETWORK")
    """Network that may connect to the head node, such as 203.0.113.7/32."""
    out: Path = option(Path("cluster.yaml"), metavar="FILE")
    """File to write."""
    force: bool = False
    """Overwrite an existing file."""
    only_print: bool = flag("--print")
    """Print the configuration instead of writing it."""


def write_aws(arguments: AwsArguments) -> int:
    """Write the configuration, and print the commands that use it."""
    cluster = _cluster(arguments)
    text = configuration(cluster)
    if arguments.only_print:
        print(text, end="")
        return 0
    _write(arguments.out, text, force=arguments.force)
    machine = KNOWN_INSTANCES.get(cluster.instance)
    gpus = f", {machine.gpus} GPUs each" if machine and machine.gpus else ""
    efa = "with EFA" if cluster.has_efa else "without EFA"
    print(f"{arguments.out}: {cluster.nodes} x {cluster.instance}{gpus}, {efa}\n")
    for purpose, line in commands(cluster, str(arguments.out)).items():
        print(f"{purpose:<9}{line}")
    print()
    for remark in notes(cluster):
        print(f"note: {remark}")
    return 0


def _cluster(arguments: AwsArguments) -> AwsCluster:
    return AwsCluster(
        nodes=arguments.nodes,
        instance=arguments.instance,
        region=arguments.region,
        subnet=arguments.subnet,
        key=arguments.key,
        head_subnet=arguments.head_subnet,
        head_instance=arguments.head_instance,
        name=arguments.name,
        system=arguments.system,
        storage=arguments.storage,
        size_gib=arguments.size,
        keep_storage=not arguments.delete_storage,
        capacity=arguments.capacity,
        reservation=arguments.reservation,
        efa=arguments.efa,
        idle_min=arguments.idle,
        ssh_from=arguments.ssh_from,
    )


def _write(out: Path, text: str, *, force: bool) -> None:
    if out.exists() and not force:
        raise ConfigError(
            f"{out} exists", fix="give another name with --out, or --force to overwrite it"
        )
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {out}: {error.strerror or error}",
            fix="give a file in a writable folder: --out FILE",
        ) from error
