"""Unreachable peers are found in seconds, and all ranks raise the same error."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.world import connectivity as reach
from paceline.world import network, roll_call
from paceline.world.address import free_port, listen_at
from paceline.world.connectivity import probe_listener, probe_peer
from paceline.world.network import call_the_roll
from paceline.world.roll_call import RollCall
from paceline.world.world import World


def test_rank_0_that_comes_late_is_waited_for() -> None:
    port, listeners = free_port("127.0.0.1"), []
    late = threading.Timer(0.3, lambda: listeners.append(listen_at("127.0.0.1", port)))
    late.start()
    route = reach.reach(lambda: ("127.0.0.1", port), 60, may_come_late=True)
    assert route == ("127.0.0.1", port, "127.0.0.1")
    late.join()
    listeners[0].close()


def test_a_connection_that_meets_itself_has_reached_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, tries = socket.create_connection, []

    def itself_at_first(where: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(where)
        if len(tries) > 1:
            return connect(where, timeout)
        own = socket.socket()
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        return own

    monkeypatch.setattr(socket, "create_connection", itself_at_first)
    with listen_at("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert reach.reach(lambda: ("127.0.0.1", port), 60, may_come_late=True)[1] == port
    assert len(tries) == 2


def test_rank_0_that_does_not_answer_is_named_with_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 0.3)
    port = free_port("127.0.0.1")
    with pytest.raises(
        EnvironmentUnfit, match=rf"127.0.0.1 on lo.* 127.0.0.1:{port}.*\n.*firewall"
    ):
        reach.reach(lambda: ("127.0.0.1", port), 60, may_come_late=False)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.ipv6)])
def test_a_listener_answers_with_its_own_token(address: str) -> None:
    with probe_listener(address) as endpoint:
        assert probe_peer(endpoint) is None
        assert probe_peer(endpoint) is None
        where, port, _, host = endpoint.split()
        assert "another service answers" in probe_peer(f"{where} {port} other {host}").problem
    assert "refused" in probe_peer(endpoint).problem


def ranks_say(size: int, act, timeout_s: float = 30) -> list[object]:
    """Let threads act as ranks that have met in one store; return what each returned or raised."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))

    def rank_says(rank: int) -> object:
        roll = RollCall(store, rank, size, serve=rank == 0, timeout_s=timeout_s, look=lambda: None)
        try:
            with roll.share_errors():
                return act(rank, roll)
        except PacelineError as error:
            return type(error), error.problem

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_says, range(size)))


def test_all_ranks_receive_the_messages_of_all() -> None:
    said = ranks_say(3, lambda rank, roll: roll.exchange("name", f"r{rank}"))
    assert said == [["r0", "r1", "r2"]] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_one_is_the_error_of_all(failing: int) -> None:
    def act(rank: int, roll: RollCall) -> object:
        if rank == failing:
            raise ConfigError("no", fix="yes")
        return roll.exchange("name", "")

    assert ranks_say(3, act) == [(ConfigError, "no")] * 3


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_FAREWELL_S", 0.2)

    told = threading.Barrier(3)

    def act(rank: int, roll: RollCall) -> object:
        if rank != 1:
            roll.post("name", "")
        told.wait(60)
        return roll.wait_for_all("name") if rank != 1 else None

    first, _, third = ranks_say(3, act, timeout_s=1)
    assert first == third == (EnvironmentUnfit, "rank 1 did not join within 1 s")


def test_two_processes_with_one_rank_are_refused() -> None:
    said = ranks_say(2, lambda rank, roll: [roll.check_in("x") for _ in range(2)])
    assert said[0][1].startswith("two processes claim to be rank")


def test_ranks_must_expect_the_same_world() -> None:
    def act(rank: int, roll: RollCall) -> object:
        return call_the_roll(World(rank, 2 + rank, 0, 1, rank, 2, "torchrun"), roll, "10.0.0.1")

    first, second = ranks_say(2, act)
    assert first == second
    assert all(word in first[1] for word in ("rank 0", "2 ranks", "rank 1", "3 ranks"))


def test_one_interface_that_reaches_nobody_is_the_error_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes whose gloo would listen on loopback: each finds nobody, or somebody else, at the other's address."""
    closed = f"127.0.0.1 {free_port('127.0.0.1')} word n2"
    probe = network.probe_peer
    monkeypatch.setattr(network, "probe_peer", lambda _: probe(closed))

    def act(rank: int, roll: RollCall) -> object:
        return network.check_connections(
            World(rank, 4, rank % 2, 2, rank // 2, 2), roll, "127.0.0.1"
        )

    said = ranks_say(4, act)
    assert len(set(said)) == 1
    assert "cannot reach n2 at 127.0.0.1" in said[0][1]
