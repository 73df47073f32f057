"""A rank of the doctor: examines its host, reports, and tests the connections to other hosts.

It starts like a rank of a training, and exits with 0 whatever it finds, because a launcher kills
all ranks at the first other exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from paceline import handover
from paceline.doctor.finding import Finding
from paceline.doctor.gpu import query_driver
from paceline.doctor.rank_facts import RankFacts, facts_as_dict
from paceline.doctor.resources import gather_resources
from paceline.doctor.single_host import examine_host
from paceline.doctor.software import query_torch, versions
from paceline.doctor.wire import ANSWER_S, Connection
from paceline.errors import PacelineError
from paceline.world.address import address_on, interface_of
from paceline.world.connectivity import probe_listener, probe_peer, reach
from paceline.world.detect import detect_world
from paceline.world.network import GLOO
from paceline.world.world import World

_THREADS = 16


def main() -> None:
    """Report to the collector; if that fails, print why as JSON."""
    order = json.loads(os.environ[handover.DOCTOR])
    host = host_name(os.environ)
    try:
        world = detect_world(os.environ, os.getppid())
        suffix = os.environ.get(handover.HOST_SUFFIX, "")
        peers = tuple(name + suffix for name in order["nodes"] if name != host)
        runs = Path(order["runs"])
        facts = gather_facts(world, os.environ, runs, peers, quick=bool(order["quick"]))
        answer = report(world, order, facts)
    except PacelineError as error:
        answer = {"problem": error.problem, "fix": error.fix}
    except (OSError, ValueError) as error:
        answer = {
            "problem": f"the connection to the doctor broke: {error}",
            "fix": "try again; check whether a host went down",
        }
    sys.stdout.write(json.dumps({"doctor": True, "host": host, **answer}) + "\n")


def host_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this host, else its own."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def gather_facts(
    world: World, env: Mapping[str, str], runs: Path, peers: tuple[str, ...], *, quick: bool
) -> RankFacts:
    """Return the facts of this rank; local rank 0 also examines its host, without torch if quick.

    `peers` are the other hosts: the route to them decides which interface is used.
    """
    gpus, findings = -1, list[Finding]()
    if world.local_rank == 0:
        torch = None if quick else query_torch()
        alone = world.nodes == 1
        findings = examine_host(env, runs, world.local_size, peers, alone=alone, torch=torch)
        if torch is None:
            gpus = len(query_driver().gpus)
        elif not torch.failure:
            gpus = len(torch.gpus)
    given = env.get("SLURM_GPUS_ON_NODE", "")
    return RankFacts(
        rank=world.rank,
        host=host_name(env),
        node=world.node,
        local_rank=world.local_rank,
        versions=versions(),
        cores=gather_resources().cores,
        gpus_seen=gpus,
        gpus_given=int(given) if given.isdecimal() else 0,
        visible=env.get("CUDA_VISIBLE_DEVICES", ""),
        findings=tuple(findings),
    )


def report(world: World, order: Mapping[str, str], facts: RankFacts) -> dict[str, object]:
    """Send the facts to the collector, answer its requests, and return its result."""
    collector = (str(order["address"]), int(order["port"]))
    wait_s = float(order["wait_s"])
    host, port, own = reach(lambda: collector, wait_s, may_come_late=True, quiet=True)
    accepted = socket.create_connection((host, port), 10)
    with ExitStack() as stack:
        connection = stack.enter_context(Connection(accepted, wait_s + ANSWER_S))
        door = ""
        if world.local_rank == 0:
            door = stack.enter_context(probe_listener(_address(world, own)))
        secret = str(order["secret"])
        connection.prove(secret, size=world.size, facts=facts_as_dict(facts), door=door)
        return _answer_requests(connection, world, door)


def _address(world: World, own: str) -> str:
    """Return the address that a training would use: of the chosen interface, else of the route."""
    chosen = world.interface or os.environ.get(GLOO, "").partition(",")[0]
    return address_on(chosen) if chosen and chosen != interface_of(own) else own


def _answer_requests(connection: Connection, world: World, door: str) -> dict[str, object]:
    while True:
        request = connection.receive()
        if "clock" in request:
            connection.send(clock=time.time())
        elif "doors" in request:
            doors = dict(request["doors"])
            doors.pop(str(world.node), None)
            connection.send(unreached=try_doors(doors) if door else {})
        else:
            return {"ok": bool(request.get("ok"))}


def try_doors(doors: Mapping[str, str]) -> dict[str, str]:
    """Connect to other hosts, several at once; return those that do not answer, and why."""
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = list(pool.map(probe_peer, map(str, doors.values())))
    unreached = {}
    for node, problem in zip(doors, problems, strict=True):
        if problem:
            unreached[node] = problem.problem
    return unreached


if __name__ == "__main__":
    main()
