"""Know the clusters: list and show their profiles; aws writes what AWS ParallelCluster needs to build one with Slurm."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path

from paceline.cluster.aws import AwsCluster
from paceline.cluster.aws_instances import KNOWN_INSTANCES
from paceline.cluster.parallelcluster import SHARED, commands, configuration, notes
from paceline.cluster.profile import load_profile, profile_folder, profile_names, profile_text
from paceline.errors import ConfigError, EnvironmentUnfit, did_you_mean
from paceline.rundir import write_whole

HELP = "clusters: list and show their profiles, or write the configuration of one on AWS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done, each with its own arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    aws = actions.add_parser(
        "aws",
        help="write a configuration for AWS ParallelCluster",
        description=_aws.__doc__,
        allow_abbrev=False,
    )
    _add_aws_arguments(aws)
    aws.set_defaults(act=_aws, parser=aws)
    listed = actions.add_parser(
        "list", help="the profiles that `paceline submit --cluster` knows", allow_abbrev=False
    )
    listed.set_defaults(act=_list, parser=listed)
    shown = actions.add_parser("show", help="all that one profile says", allow_abbrev=False)
    shown.add_argument("name", help="as `list` has it")
    shown.set_defaults(act=_show, parser=shown)
    for action in (listed, shown):
        action.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(parser=parser)


def main(known: argparse.Namespace) -> int:
    """Do what was asked."""
    if not hasattr(known, "act"):
        raise ConfigError(
            "cluster: what is to be done?",
            fix="use one of: list, show NAME, aws (`paceline cluster aws --help`)",
        )
    if known.arguments:
        word = known.arguments[0]
        fix = did_you_mean(word, _options(known.parser)) if word.startswith("-") else "take it out"
        raise ConfigError(f"unexpected {word!r}", fix=fix)
    done: int = known.act(known)
    return done


def _list(known: argparse.Namespace) -> int:
    """List the profiles, and where the user's own are."""
    folder = profile_folder(os.environ)
    own = {name: (folder / f"{name}.toml").is_file() for name in profile_names(folder)}
    if known.json:
        profiles = [{"name": name, "own": is_own} for name, is_own in own.items()]
        print(json.dumps({"folder": str(folder), "profiles": profiles}, indent=2))
        return 0
    for name, is_own in own.items():
        print(f"{name}{'  (your own)' if is_own else ''}")
    print(f'\nyour own are TOML files in {folder}; begin one with like = "generic"')
    return 0


def _show(known: argparse.Namespace) -> int:
    """Print a profile with all its fields."""
    text = profile_text(load_profile(known.name, profile_folder(os.environ)))
    print(json.dumps(tomllib.loads(text), indent=2) if known.json else text.rstrip("\n"))
    return 0


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions for word in action.option_strings]  # noqa: SLF001 - no public way


def _add_aws_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the choices of a cluster on AWS; what has no default must be given, and is asked for by name."""
    add = parser.add_argument
    add(
        "--nodes",
        type=int,
        default=0,
        metavar="N",
        help="most compute nodes at once; none runs while no job waits",
    )
    add("--instance", default="", help="their kind, as in p4d.24xlarge (8 A100)")
    add("--region", default="", help="as in eu-west-1")
    add("--subnet", default="", help="subnet of the compute nodes; with EFA a private one")
    add(
        "--key", default="", metavar="NAME", help="the EC2 key pair that opens the head node by ssh"
    )
    add(
        "--head-subnet",
        default="",
        metavar="SUBNET",
        help="subnet of the head node (default: the same)",
    )
    add("--head-instance", default="m6i.xlarge", metavar="KIND", help="(default: %(default)s)")
    add("--name", default="paceline", help="of the cluster (default: %(default)s)")
    add(
        "--os",
        default="ubuntu2404",
        dest="system",
        help="(default: %(default)s, which has Python 3.12)",
    )
    add(
        "--storage",
        default="fsx-lustre",
        help=f"behind {SHARED}: fsx-lustre, efs or ebs (default: %(default)s)",
    )
    add(
        "--size",
        type=int,
        default=0,
        metavar="GIB",
        help="of the storage (default: 1200 for fsx-lustre, 500 for ebs)",
    )
    add(
        "--delete-storage",
        action="store_true",
        help="delete the storage, with its runs, together with the cluster",
    )
    add("--capacity", default="ondemand", help="ondemand, spot or block (default: %(default)s)")
    add(
        "--reservation",
        default="",
        metavar="ID",
        help="take the nodes from this capacity reservation or block",
    )
    add(
        "--efa",
        default="auto",
        help="the fast network: on, off, or auto: where the instance is known to have it",
    )
    add(
        "--idle",
        type=int,
        default=10,
        metavar="MIN",
        help="give back a node idle so long (default: %(default)s)",
    )
    add(
        "--ssh-from",
        default="",
        metavar="NETWORK",
        help="who may reach the head node, as 203.0.113.7/32",
    )
    add(
        "--out",
        type=Path,
        default=Path("cluster.yaml"),
        metavar="FILE",
        help="(default: %(default)s)",
    )
    add("--force", action="store_true", help="write over a file that exists")
    add(
        "--print",
        action="store_true",
        dest="only_print",
        help="show the configuration, and write nothing",
    )


def _aws(known: argparse.Namespace) -> int:
    """Write a configuration for AWS ParallelCluster: Slurm, EFA, shared storage. Nothing is built, nothing costs, yet."""
    cluster = _cluster(known)
    text = configuration(cluster)
    if known.only_print:
        print(text, end="")
        return 0
    _write(known.out, text, force=known.force)
    machine = KNOWN_INSTANCES.get(cluster.instance)
    gpus = f", {machine.gpus} GPUs each" if machine and machine.gpus else ""
    print(
        f"{known.out}: {cluster.nodes} x {cluster.instance}{gpus}, {'with' if cluster.has_efa else 'without'} EFA\n"
    )
    print(
        "\n".join(
            f"{purpose:<9}{line}" for purpose, line in commands(cluster, str(known.out)).items()
        )
    )
    print("\n" + "\n".join(f"note: {note}" for note in notes(cluster)))
    return 0


def _cluster(known: argparse.Namespace) -> AwsCluster:
    return AwsCluster(
        nodes=known.nodes,
        instance=known.instance,
        region=known.region,
        subnet=known.subnet,
        key=known.key,
        head_subnet=known.head_subnet,
        head_instance=known.head_instance,
        name=known.name,
        system=known.system,
        storage=known.storage,
        size_gib=known.size,
        keep_storage=not known.delete_storage,
        capacity=known.capacity,
        reservation=known.reservation,
        efa=known.efa,
        idle_min=known.idle,
        ssh_from=known.ssh_from,
    )


def _write(out: Path, text: str, *, force: bool) -> None:
    if out.exists() and not force:
        raise ConfigError(
            f"{out} exists", fix="give another name with --out, or --force to write over it"
        )
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {out}: {error.strerror or error}",
            fix="name a file in a folder that you may write: --out",
        ) from error
