"""The network interface between nodes, and the test that it reaches the peers."""

from __future__ import annotations

import contextlib
import os

from paceline.errors import EnvironmentUnfit
from paceline.world.address import address_on, interface_of, is_loopback, source_towards
from paceline.world.connectivity import probe_listener, probe_peer
from paceline.world.rendezvous_file import error_from_json, error_to_json
from paceline.world.roll_call import RollCall
from paceline.world.world import World

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def call_the_roll(world: World, roll: RollCall, own: str) -> list[str]:
    """Wait for all ranks; return the address of each on its way to the rendezvous.

    All must expect the same world.
    """
    expected = f"{world.size} ranks"
    if world.launcher == "paceline":  # typed by hand on each host
        expected += f" ({world.local_size} per host)"
    if not world.is_main:  # before this rank counts as present
        _, of_rank_0 = roll.wait_for("present", 0).split(" ", 1)
        if of_rank_0 != expected:
            raise EnvironmentUnfit(
                f"rank 0 expects {of_rank_0}, but rank {world.rank} expects {expected}",
                fix="pass the same -n and the same --nodes on every host",
            )
    roll.check_in(f"{own} {expected}")
    return [message.split(" ", 1)[0] for message in roll.wait_for_all("present")]


def choose_interface(world: World, own: str, everyone: list[str]) -> str:
    """Return the interface towards the peers; empty if it cannot be determined.

    A rank that reaches rank 0 over loopback is on its machine, and looks for the route to another node instead.

    >>> choose_interface(World(), "127.0.0.1", ["127.0.0.1", "127.0.0.1"])
    'lo'
    """
    if world.interface:
        return world.interface
    remote = next((address for address in everyone if not is_loopback(address)), "")
    return interface_of(source_towards(remote) if is_loopback(own) and remote else own)


def prepare_network(
    world: World, roll: RollCall, own: str, everyone: list[str], backend: str
) -> None:
    """Set the interface of the backend and test that it reaches the peers; every rank raises the same error."""
    chosen = choose_interface(world, own, everyone)
    if chosen:
        os.environ.setdefault(GLOO, chosen)
    if world.interface:
        os.environ.setdefault(NCCL, chosen)
    used = os.environ.get(GLOO, chosen).partition(",")[0] if backend == "gloo" else chosen
    check_connections(world, roll, address_on(used) if used else own)


def check_connections(world: World, roll: RollCall, address: str) -> None:
    """Connect one rank of each node to the next node and to the first."""
    with contextlib.ExitStack() as stack:
        endpoint = ""
        if world.local_rank == 0:
            endpoint = stack.enter_context(probe_listener(address))
        endpoints = [text for text in roll.exchange("endpoint", endpoint) if text]
        error = _probe_neighbours(endpoint, endpoints) if endpoint else None
        results = roll.exchange("result", error_to_json(error) if error else "")
    for result in results:
        if result:
            raise error_from_json(result)


def _probe_neighbours(own: str, endpoints: list[str]) -> EnvironmentUnfit | None:
    following = endpoints[(endpoints.index(own) + 1) % len(endpoints)]
    for endpoint in {following, endpoints[0]} - {own}:
        if error := probe_peer(endpoint):
            return error
    return None
