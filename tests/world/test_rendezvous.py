"""Ranks meet in the store of their own start, whoever else still serves one at that address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from paceline.errors import EnvironmentUnfit
from paceline.world.address import free_port, listen_at
from paceline.world.rendezvous import open_tcp_store, serve_store
from paceline.world.world import TcpRendezvous
from support.program import wait_until

HOST, MINUTE = "127.0.0.1", timedelta(seconds=60)


def test_the_store_of_an_earlier_start_is_waited_out() -> None:
    port, looks = free_port(HOST), []
    old, _ = serve_store(listen_at(HOST, port), "paceline-0", MINUTE)
    with ThreadPoolExecutor(1) as pool:
        rendezvous = TcpRendezvous(HOST, port, serve=False, prefix="paceline-1")
        visit = pool.submit(open_tcp_store, rendezvous, MINUTE, look=lambda: looks.append(1))
        wait_until(lambda: len(looks) > 3, "the visitor has seen that the store is not open")
        assert not visit.done()
        del old
        new, _ = serve_store(listen_at(HOST, port), "paceline-1", MINUTE)
        new.set("word", "of this start")
        store, own = visit.result(60)
    assert (store.get("word"), own) == (b"of this start", HOST)


def test_a_store_that_nobody_opens_for_this_start_is_not_waited_for_in_vain() -> None:
    port = free_port(HOST)
    _old = serve_store(listen_at(HOST, port), "paceline-0", MINUTE)
    rendezvous = TcpRendezvous(HOST, port, serve=False, prefix="paceline-1")
    with pytest.raises(EnvironmentUnfit, match=f"{HOST}:{port} within 0.3 s\n.*timeout.start_s"):
        open_tcp_store(rendezvous, timedelta(seconds=0.3))


def test_where_an_agent_serves_the_store_the_first_rank_opens_it() -> None:
    port = free_port(HOST)
    _agent = serve_store(listen_at(HOST, port), "agent", MINUTE)
    rendezvous = TcpRendezvous(HOST, port, serve=False, prefix="paceline-0")
    first, _ = open_tcp_store(rendezvous, MINUTE, first=True)
    first.set("word", "of rank 0")
    assert open_tcp_store(rendezvous, MINUTE)[0].get("word") == b"of rank 0"
