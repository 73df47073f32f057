"""The environment of a rank: the variables of torchrun for any script, and those of Paceline for `paceline.Run`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline import handover
from paceline.launch.spec import LaunchSpec
from paceline.world.address import split_address

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_768)  # below the ephemeral ports, which any connection may take
_TRIES = 100


class Master(NamedTuple):
    """Where a script's own `init_process_group` opens its store; `paceline.Run` never does on one node."""

    host: str
    port: int


def master_of(spec: LaunchSpec) -> Master:
    """Return the address of rank 0: a free port of this machine, or the rendezvous of several hosts."""
    if spec.address:
        return Master(*split_address(spec.address))
    return Master(LOOPBACK, free_port())


def free_port() -> int:
    """Return a port on which nothing listens now."""
    for _ in range(_TRIES):
        if port := _bound_port(secrets.choice(_PORTS)):
            return port
    return _bound_port(0)


def _bound_port(port: int) -> int:
    """Return the port after a test; 0 if it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def rank_environment(
    spec: LaunchSpec, number: int, rendezvous: Path, failure_file: Path, master: Master
) -> dict[str, str]:
    """Return all variables of one rank."""
    env = os.environ | spec.variables(os.environ) | torchrun_variables(spec, number, master)
    env.pop(handover.ADDRESS, None)  # of an outer launch
    if spec.address:
        env[handover.ADDRESS] = f"{spec.address}/{spec.attempt}"
    else:
        keep_gloo_on_loopback(env)
    env |= {handover.MEETING: str(rendezvous), handover.FAILURE: str(failure_file)}
    env[handover.PROGRESS] = str(handover.progress_file(rendezvous))
    env[handover.LAUNCHER] = str(os.getpid())
    env.pop(handover.DUMP, None)
    if spec.folder and not spec.target.interpreter and handover.DUMP_SIGNAL:
        env[handover.DUMP] = str(handover.dump_of(failure_file))
    env.pop(handover.KEYBOARD, None)
    with contextlib.suppress(OSError):  # no terminal
        env[handover.KEYBOARD] = os.ttyname(0)
    return env


def torchrun_variables(spec: LaunchSpec, number: int, master: Master) -> dict[str, str]:
    """Return what torchrun gives to a rank.

    >>> from paceline.launch.spec import module
    >>> spec = LaunchSpec(module("toy", "toy"), ranks=2)
    >>> found = torchrun_variables(spec, 1, Master("127.0.0.1", 29500))
    >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]
    ('1', '2', '127.0.0.1', '29500')
    """
    values: Mapping[str, object] = {
        "RANK": number,
        "WORLD_SIZE": spec.size,
        "LOCAL_RANK": number - spec.numbers.start,
        "LOCAL_WORLD_SIZE": spec.ranks,
        "GROUP_RANK": spec.node,
        "GROUP_WORLD_SIZE": spec.nodes,
        "ROLE_RANK": number,
        "ROLE_WORLD_SIZE": spec.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.host,
        "MASTER_PORT": master.port,
        "TORCHELASTIC_RESTART_COUNT": spec.attempt,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": _run_id(spec),
        # torchrun's agent serves a store; here rank 0 opens its own.
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in values.items()}


def _run_id(spec: LaunchSpec) -> str:
    """Return a name that all hosts and all restarts of a launch share."""
    if spec.address:
        return re.sub(r"[^\w.-]", "_", f"paceline-{spec.address}")
    return f"paceline-{os.getpid()}"


def keep_gloo_on_loopback(env: dict[str, str]) -> None:
    """Let gloo of any script listen on loopback, unless the user chose an interface."""
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
