"""Which network interface carries the training between nodes, and whether it reaches the peers."""

from __future__ import annotations

import contextlib
import os

from paceline.errors import EnvironmentUnfit
from paceline.world.address import address_on, interface_of, is_loopback, source_towards
from paceline.world.connectivity import probe_listener, probe_peer
from paceline.world.rendezvous_file import problem_from, problem_text
from paceline.world.roll_call import RollCall
from paceline.world.world import World

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def call_the_roll(world: World, roll: RollCall, own: str) -> list[str]:
    """Wait for all ranks; return the address of each on its way to the meeting. All must count the same world."""
    by_hand = world.launcher == "paceline"
    counts = (
        f"{world.size} ranks, {world.local_size} on each host" if by_hand else f"{world.size} ranks"
    )
    if not world.is_main:  # before it is counted in
        _, theirs = roll.word_of("came", 0).split(" ", 1)
        if theirs != counts:
            raise EnvironmentUnfit(
                f"rank 0 counts {theirs}, but rank {world.rank} counts {counts}",
                fix="start all nodes alike: the same -n and the same --nodes on every host",
            )
    roll.come(f"{own} {counts}")
    return [word.split(" ", 1)[0] for word in roll.hear("came")]


def choose_interface(world: World, own: str, everyone: list[str]) -> str:
    """Return the interface that leads to the peers; empty if none can be told.

    Who reaches rank 0 by loopback shares its machine, and asks for the way to somebody who does not.

    >>> choose_interface(World(), "127.0.0.1", ["127.0.0.1", "127.0.0.1"])
    'lo'
    """
    if world.interface:
        return world.interface
    away = next((address for address in everyone if not is_loopback(address)), "")
    return interface_of(source_towards(away) if is_loopback(own) and away else own)


def prepare_network(
    world: World, roll: RollCall, own: str, everyone: list[str], backend: str
) -> None:
    """Tell the backend which interface to use, and see that it reaches the peers; every rank gets the same error."""
    chosen = choose_interface(world, own, everyone)
    if chosen:
        os.environ.setdefault(GLOO, chosen)
    if world.interface:
        os.environ.setdefault(NCCL, chosen)
    named = os.environ.get(GLOO, chosen).partition(",")[0] if backend == "gloo" else chosen
    _try_doors(world, roll, address_on(named) if named else own)


def _try_doors(world: World, roll: RollCall, address: str) -> None:
    """Let one rank of each node try the next node, and the first."""
    stands_for_node = world.local_rank == 0
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(probe_listener(address)) if stands_for_node else ""
        doors = [word for word in roll.exchange("door", door) if word]
        after = doors[(doors.index(door) + 1) % len(doors)] if door else ""
        problem = (
            next(filter(None, map(probe_peer, {after, doors[0]} - {door})), None) if door else None
        )
        verdicts = roll.exchange("verdict", problem_text(problem) if problem else "")
    for verdict in filter(None, verdicts):
        raise problem_from(verdict)
