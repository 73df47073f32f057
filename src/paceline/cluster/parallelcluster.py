"""The configuration file of AWS ParallelCluster for an `AwsCluster`, and the commands to use it."""

from __future__ import annotations

import shlex

from paceline.cluster.aws import DEFAULT_GIB, AwsCluster, Capacity, Storage
from paceline.cluster.aws_instances import KNOWN_INSTANCES
from paceline.cluster.yaml_writer import Value, as_yaml

SHARED = "/shared"
"""Mount point of the storage that all nodes share; runs are written there."""
QUEUE = "train"
"""The partition; the cluster profile aws-parallelcluster has the same name in it."""

_CAPACITY_TYPE: dict[Capacity, str] = {
    "ondemand": "ONDEMAND",
    "spot": "SPOT",
    "block": "CAPACITY_BLOCK",
}


def configuration(cluster: AwsCluster) -> str:
    """Return the YAML file that `pcluster create-cluster` reads.

    >>> text = configuration(
    ...     AwsCluster(2, "p4d.24xlarge", "eu-west-1", "subnet-0123456789abcdef0", "me")
    ... )
    >>> text.splitlines()[:3]
    ['Region: "eu-west-1"', 'Image:', '  Os: "ubuntu2404"']
    """
    return as_yaml(
        {
            "Region": cluster.region,
            "Image": {"Os": cluster.system},
            "HeadNode": _head_node(cluster),
            "Scheduling": {
                "Scheduler": "slurm",
                "ScalingStrategy": "all-or-nothing",  # half of a job's nodes cannot run it
                "SlurmSettings": {
                    "ScaledownIdletime": cluster.idle_min,
                    "QueueUpdateStrategy": "DRAIN",
                },
                "SlurmQueues": [_queue(cluster)],
            },
            "SharedStorage": [_storage(cluster)],
        }
    )


def _head_node(cluster: AwsCluster) -> dict[str, Value]:
    ssh: dict[str, Value] = {"KeyName": cluster.key}
    if cluster.ssh_from:
        ssh["AllowedIps"] = cluster.ssh_from
    return {
        "InstanceType": cluster.head_instance,
        "Networking": {"SubnetId": cluster.head_subnet or cluster.subnet},
        "Ssh": ssh,
    }


def _queue(cluster: AwsCluster) -> dict[str, Value]:
    # A capacity block is paid for whether it is used or not.
    minimum = cluster.nodes if cluster.capacity == "block" else 0
    resource: dict[str, Value] = {
        "Name": "nodes",
        "InstanceType": cluster.instance,
        "MinCount": minimum,
        "MaxCount": cluster.nodes,
    }
    # One subnet: EFA and Lustre work only within one availability zone.
    networking: dict[str, Value] = {"SubnetIds": [cluster.subnet]}
    if cluster.has_efa:
        resource["Efa"] = {"Enabled": True}
        if cluster.capacity != "block":
            # The nodes of a reservation are placed already.
            networking["PlacementGroup"] = {"Enabled": not cluster.reservation}
    if cluster.reservation:
        resource["CapacityReservationTarget"] = {"CapacityReservationId": cluster.reservation}
    return {
        "Name": QUEUE,
        "CapacityType": _CAPACITY_TYPE[cluster.capacity],
        "Networking": networking,
        "ComputeResources": [resource],
    }


def _storage(cluster: AwsCluster) -> dict[str, Value]:
    size = cluster.size_gib or DEFAULT_GIB[cluster.storage]
    deletion: dict[str, Value] = {"DeletionPolicy": "Retain" if cluster.keep_storage else "Delete"}
    lustre: dict[str, Value] = {
        "StorageCapacity": size,
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 125,
    }
    kinds: dict[Storage, tuple[str, dict[str, Value]]] = {
        "fsx-lustre": ("FsxLustre", {**lustre, **deletion}),
        "efs": ("Efs", {"Encrypted": True, **deletion}),
        "ebs": ("Ebs", {"VolumeType": "gp3", "Size": size, "Encrypted": True, **deletion}),
    }
    kind, settings = kinds[cluster.storage]
    return {"Name": "shared", "MountDir": SHARED, "StorageType": kind, f"{kind}Settings": settings}


def commands(cluster: AwsCluster, file: str) -> dict[str, str]:
    """Return the commands to type, by purpose, from installation to deletion.

    >>> cluster = AwsCluster(2, "p4d.24xlarge", "eu-west-1", "subnet-0123456789abcdef0", "me")
    >>> commands(cluster, "a b.yaml")["enter"]
    'pcluster ssh --cluster-name paceline --region eu-west-1'
    """
    this_cluster = f"--cluster-name {cluster.name} --region {cluster.region}"
    create = f"pcluster create-cluster {this_cluster} --cluster-configuration {shlex.quote(file)}"
    known = KNOWN_INSTANCES.get(cluster.instance)
    gpus = known.gpus if known else "GPUS"
    submit = "paceline submit --cluster aws-parallelcluster SCRIPT"
    size = f"--nodes {cluster.nodes} --gpus-per-node {gpus} --time 02:00:00"
    return {
        "install": "pip install aws-parallelcluster",
        "check": f"{create} --dryrun true",
        "create": create,
        "follow": f"pcluster describe-cluster {this_cluster}",
        "enter": f"pcluster ssh {this_cluster}",
        "train": f"{submit} {size} runs={SHARED}/runs",
        "delete": f"pcluster delete-cluster {this_cluster}",
    }


def notes(cluster: AwsCluster) -> list[str]:
    """Return the consequences of the choices for network, ssh access and costs, a line each."""
    lines = []
    if cluster.efa == "auto" and cluster.instance not in KNOWN_INSTANCES:
        lines.append(
            f"EFA is off because it is not known whether {cluster.instance} has it; "
            "--efa on turns it on"
        )
    if cluster.has_efa:
        lines.append(
            "with EFA a node has several network interfaces and no public address: "
            f"{cluster.subnet} must be a private subnet with a NAT gateway"
        )
        if cluster.head_subnet in {"", cluster.subnet}:
            lines.append(
                "the head node is in the same private subnet; "
                "--head-subnet puts it where you can reach it by ssh"
            )
    if not cluster.ssh_from:
        lines.append(
            "the head node accepts ssh connections from any address; "
            "--ssh-from 203.0.113.7/32 restricts them to yours"
        )
    if cluster.keep_storage:
        lines.append(
            f"{SHARED} outlives the cluster and costs money until you delete it; "
            "--delete-storage deletes it with the cluster"
        )
    else:
        lines.append(f"deleting the cluster deletes {SHARED} and every run in it")
    return lines
