"""What a rank of the doctor does: looks at its host, reports, and tries the ways to the other hosts.

It is started as the ranks of a training would be, and ends with 0 whatever it finds: a launcher ends all ranks at the first other code.
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
from paceline.doctor.gpu import query_driver
from paceline.doctor.rank_facts import RankFacts, sent
from paceline.doctor.resources import gather_resources
from paceline.doctor.single_host import examine_host
from paceline.doctor.software import TorchFacts, query_torch, versions
from paceline.doctor.wire import ANSWER_S, Connection
from paceline.errors import PacelineError
from paceline.world.address import address_on, interface_of
from paceline.world.connectivity import probe_listener, probe_peer, reach
from paceline.world.detect import detect_world
from paceline.world.network import GLOO
from paceline.world.world import World

_AT_ONCE = 16


def main() -> None:
    """Report; where that is not possible, print why."""
    told = json.loads(os.environ[handover.DOCTOR])
    try:
        world = detect_world(os.environ, os.getppid())
        suffix = os.environ.get(handover.HOST_SUFFIX, "")
        peers = tuple(name + suffix for name in told["nodes"] if name != host_name(os.environ))
        answer = report(
            world,
            told,
            look(world, os.environ, Path(told["runs"]), peers, quick=bool(told["quick"])),
        )
    except PacelineError as error:
        answer = {"problem": error.problem, "fix": error.fix}
    except (OSError, ValueError) as error:
        answer = {
            "problem": f"the report was broken off: {error}",
            "fix": "try again; see whether a host went away",
        }
    sys.stdout.write(json.dumps({"doctor": True, "host": host_name(os.environ), **answer}) + "\n")


def host_name(env: Mapping[str, str]) -> str:
    """Return what this host is called: as Slurm names it, else as it names itself."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def look(
    world: World, env: Mapping[str, str], runs: Path, peers: tuple[str, ...], *, quick: bool
) -> RankFacts:
    """Gather the facts of this rank; the first of each host looks at the host, too, and asks torch, unless it must be quick.

    `peers` are the other hosts: the way to them decides which interface carries the messages.
    """
    first = world.local_rank == 0
    torch = query_torch() if first and not quick else None
    given = env.get("SLURM_GPUS_ON_NODE", "")
    alone = world.nodes == 1
    return RankFacts(
        rank=world.rank,
        host=host_name(env),
        node=world.node,
        local_rank=world.local_rank,
        versions=versions(),
        cores=gather_resources().cores,
        gpus_seen=_gpus_seen(torch) if first else -1,
        gpus_given=int(given) if given.isdecimal() else 0,
        visible=env.get("CUDA_VISIBLE_DEVICES", ""),
        found=tuple(examine_host(env, runs, world.local_size, peers, alone=alone, torch=torch))
        if first
        else (),
    )


def _gpus_seen(torch: TorchFacts | None) -> int:
    if torch is None:
        return len(query_driver().gpus)
    return -1 if torch.failure else len(torch.gpus)


def report(world: World, told: Mapping[str, str], facts: RankFacts) -> dict[str, object]:
    """Tell the facts to who examines, try the ways to the other hosts, and return what was made of it."""
    where, wait_s = (str(told["address"]), int(told["port"])), float(told["wait_s"])
    host, port, own = reach(lambda: where, wait_s, may_come_late=True, quiet=True)
    connection = socket.create_connection((host, port), 10)
    with ExitStack() as stack:
        talk = stack.enter_context(Connection(connection, wait_s + ANSWER_S))
        door = (
            stack.enter_context(probe_listener(_address(world, own)))
            if world.local_rank == 0
            else ""
        )
        talk.prove(str(told["secret"]), size=world.size, facts=sent(facts), door=door)
        return _answer(talk, world, door)


def _address(world: World, own: str) -> str:
    """Return the address that the messages of a training would take: of the interface that was chosen, else of the way to the others."""
    chosen = world.interface or os.environ.get(GLOO, "").partition(",")[0]
    return address_on(chosen) if chosen and chosen != interface_of(own) else own


def _answer(talk: Connection, world: World, door: str) -> dict[str, object]:
    """Do what is asked, until the verdict comes."""
    while True:
        asked = talk.hear()
        if "clock" in asked:
            talk.say(clock=time.time())
        elif "doors" in asked:
            others = {
                node: str(other)
                for node, other in asked["doors"].items()
                if int(node) != world.node
            }
            talk.say(unreached=try_doors(others) if door else {})
        else:
            return {"ok": bool(asked.get("ok"))}


def try_doors(doors: Mapping[str, str]) -> dict[str, str]:
    """Ring at the doors of other hosts, several at once; return those that do not answer, and why."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        problems = dict(zip(doors, pool.map(probe_peer, doors.values()), strict=True))
    return {node: problem.problem for node, problem in problems.items() if problem}


if __name__ == "__main__":
    main()
