"""Start Slurm's daemons on the hosts, and read the states of the nodes."""

from __future__ import annotations

import subprocess

from support.slurm_cluster.commands import inside, output_inside, wait_until
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD, Settings

_SOCKET = "/run/mysqld/mysqld.sock"


def start_head(place: Place, settings: Settings) -> None:
    """Start the head's daemons and wait: a slurmd that finds no slurmctld retries only after a second."""
    output_inside(place, HEAD, "sh", "-c", _munged(place, HEAD))
    if settings.accounting:
        _start_database(place)
    output_inside(place, HEAD, "slurmctld")
    wait_until("slurmctld", lambda: " UP" in output_inside(place, HEAD, "scontrol", "ping"))


def start_nodes(place: Place, names: list[str]) -> None:
    """Start the daemons of some nodes, all at once."""
    commands = {
        name: [*inside(place, name), "sh", "-c", f"{_munged(place, name)} && slurmd -N {name}"]
        for name in names
    }
    starting = {name: _start(command) for name, command in commands.items()}
    said = {name: process.communicate()[0].strip() for name, process in starting.items()}
    for name, process in starting.items():
        if process.returncode:
            raise ClusterError(f"{name}: {said[name]}")


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _munged(place: Place, host: str) -> str:
    files = "--key-file=/etc/munge/munge.key --pid-file=/run/munge/pid --seed-file=/run/munge/seed"
    return f"munged --force {files} --log-file={place.log}/munged-{host}.log"


def _start_database(place: Place) -> None:
    """Start MariaDB without network, root by Unix socket, and slurmdbd on it."""
    _install_database(place)
    place_of_data = f"--datadir={place.database} --socket={_SOCKET} --innodb-buffer-pool-size=64M"
    server = f"setsid mariadbd --no-defaults --user=root --skip-networking {place_of_data}"
    output_inside(place, HEAD, "sh", "-c", f"{server} >{place.log}/mariadbd.log 2>&1 </dev/null &")
    wait_until("MariaDB", lambda: output_inside(place, HEAD, "test", "-S", _SOCKET) or True)
    output_inside(place, HEAD, "slurmdbd")
    wait_until(
        "slurmdbd", lambda: output_inside(place, HEAD, "sacctmgr", "-i", "show", "cluster") or True
    )


def _install_database(place: Place) -> None:
    place.database.mkdir()
    options = ("--user=root", "--skip-test-db", "--auth-root-authentication-method=normal")
    output_inside(
        place, HEAD, "mariadb-install-db", "--no-defaults", f"--datadir={place.database}", *options
    )


def node_states(place: Place) -> dict[str, str]:
    """Return slurmctld's state of each node: idle, mixed, down* and so on."""
    lines = output_inside(place, HEAD, "sinfo", "-h", "-N", "-o", "%N %T").splitlines()
    return dict(line.split() for line in lines)


def wait_for_idle_nodes(place: Place) -> None:
    """Wait until jobs can start everywhere."""
    wait_until("nodes", lambda: set(node_states(place).values()) == {"idle"})


def slurmd(place: Place, node: str, verb: str) -> None:
    """Start a node's slurmd, or end it (`stop`, `kill`) without its jobs, until its port is free again."""
    if verb == "start":
        output_inside(place, node, "slurmd", "-N", node)
    else:
        signal = {"kill": "KILL", "stop": "TERM"}[verb]
        gone = "while kill -0 $pid 2>/dev/null; do sleep 0.02; done"
        output_inside(
            place, node, "sh", "-c", f"pid=$(cat /run/slurmd.pid) && kill -{signal} $pid && {gone}"
        )
