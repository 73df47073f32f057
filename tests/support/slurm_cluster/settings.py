"""The settings of a cluster, fixed at its start. Every field is an option of `start`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from support.slurm_cluster.errors import ClusterError

HEAD = "head"
_SUBNET = "10.77.0."
_MOST_NODES = 200


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """All settings of a cluster."""

    nodes: int = _option(2, "nodes, n1 and up; the head is one more host")
    cpus: int = _option(4, "CPUs each node claims to have")
    memory: int = _option(8000, "MB each node claims to have")
    gpus: int = _option(2, "fake GPUs of each node")
    gpu_type: str = _option("h100", "what Slurm calls them")
    grace: int = _option(0, "GraceTime of partition low, in seconds")
    pkg: str = _option(
        "",
        "where Slurm is unpacked ($CLUSTER_PKG, else a folder of this user's that all clusters share)",
    )
    set: tuple[str, ...] = _option((), "a setting of slurm.conf, KEY=VALUE")
    line: tuple[str, ...] = _option((), "a further line of slurm.conf")
    node_local: tuple[str, ...] = _option((), "a folder that every node has for itself")
    shared: tuple[str, ...] = _option((), "a folder below a node-local one that stays shared")
    rate: str = _option("", "rate of every node's link, such as 1gbit")
    delay_ms: float = _option(0.0, "delay one way (a relay in user space; needs no netem)")
    mtu: int = _option(9000, "with --delay-ms")
    cgroup: bool = _option(False, "contain jobs by cgroup v1")
    slurm: bool = _option(True, "only hosts and network")  # the help of --no-slurm

    def names(self) -> list[str]:
        """Return the names of the nodes.

        >>> Settings(nodes=3).names()
        ['n1', 'n2', 'n3']
        """
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    def hosts(self) -> list[str]:
        """Return the names of all hosts, the head first."""
        return [HEAD, *self.names()]

    def packages(self) -> Path:
        """Return the folder in which Slurm is unpacked."""
        return Path(self.pkg or os.environ.get("CLUSTER_PKG") or shared_packages()).absolute()

    def words(self) -> list[str]:
        """Return the settings as command-line options.

        >>> Settings(nodes=3, set=("KillWait=5",), cgroup=True, slurm=False).words()
        ['--nodes', '3', '--set', 'KillWait=5', '--cgroup', '--no-slurm']
        """
        changed = [
            option for option in fields(self) if getattr(self, option.name) != option.default
        ]
        return [word for option in changed for word in _words(option, getattr(self, option.name))]

    def check(self, folder: Path) -> None:
        """Raise an error for settings that cannot work."""
        if not 1 <= self.nodes <= _MOST_NODES:
            raise ClusterError(f"{self.nodes} nodes: 1 to {_MOST_NODES} are possible")
        if set(":,") & set(f"{folder}{self.packages()}"):
            raise ClusterError(
                f"no ':' or ',' may be in {folder} or {self.packages()}: overlayfs takes them for its own"
            )

    def save(self, file: Path) -> None:
        """Write the settings to a file."""
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, file: Path) -> Settings:
        """Read the settings that `save` wrote."""
        return cls.of(json.loads(file.read_text()))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings from values that may be lists where tuples are meant."""
        given: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**given)


def flag(option: Field[Any]) -> str:
    """Return the flag of a field.

    >>> [flag(option) for option in fields(Settings) if option.name in ("gpu_type", "slurm")]
    ['--gpu-type', '--no-slurm']
    """
    return ("--no-" if option.default is True else "--") + option.name.replace("_", "-")


def _words(option: Field[Any], value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(option)]
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (flag(option), str(each))]


def shared_packages() -> Path:
    """Return the folder that all clusters of this user share."""
    return Path(tempfile.gettempdir()) / f"slurm-packages-{os.geteuid()}"


def address(host: str) -> str:
    """Return the address of a host.

    >>> address("head"), address("n2")
    ('10.77.0.1', '10.77.0.12')
    """
    return _SUBNET + ("1" if host == HEAD else str(10 + int(host[1:])))
