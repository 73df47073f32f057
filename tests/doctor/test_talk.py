"""Hosts report to one address by JSON alone; strangers, wrong clocks and missing hosts are found."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.doctor.collector import Collector
from paceline.doctor.cross_host import judge_clocks
from paceline.doctor.rank_facts import RankFacts, facts_as_dict
from paceline.doctor.wire import Connection
from paceline.world.address import free_port
from support.program import wait_until

SECRET = "a word"


def facts(rank: int) -> RankFacts:
    return RankFacts(rank, f"n{rank}", rank, 0, {"torch": "2.13"}, (0,))


def guest(port: int, rank: int, secret: str = SECRET, ahead_s: float = 0.0) -> list:
    """Report like a rank, with a clock that may be wrong; return the requests it received."""
    heard = []
    with Connection(socket.create_connection(("127.0.0.1", port)), 30) as talk:
        try:
            talk.prove(secret, size=2, facts=facts_as_dict(facts(rank)), door="")
            while "ok" not in (asked := talk.receive()):
                heard.append(asked)
                talk.send(clock=time.time() + ahead_s) if "clock" in asked else talk.send(
                    unreached={"0": "no"} if rank else {}
                )
            heard.append(asked)
        except ConnectionError:
            heard.append("sent away")
    return heard


def test_ranks_are_received_their_clocks_compared_and_strangers_sent_away():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    heard: dict[str, list] = {}
    guests = {"first": (0,), "ahead": (1, SECRET, 20.0), "stranger": (0, "another word")}

    def visit(name: str) -> None:
        heard[name] = guest(port, *guests[name])

    with (
        Collector(listener, SECRET, 2) as collector,
        socket.create_connection(("127.0.0.1", port)) as noise,
    ):
        noise.sendall(b"GET / HTTP/1.0\r\n\r\n")
        threads = [threading.Thread(target=visit, args=(name,)) for name in guests]
        for thread in reversed(threads):
            thread.start()
        threads[2].join(30)
        came = collector.examine(60, lambda: False)
        collector.dismiss(ok=False)
        for thread in threads:
            thread.join(30)
    assert [one.host for one in came] == ["n0", "n1"]
    assert heard["stranger"] == ["sent away"]
    assert heard["first"][-1] == {"ok": False}
    assert came[1].unreached == {0: "no"}
    assert abs(came[1].clock_s - 20) < 10
    (found,) = judge_clocks(came)
    assert not found.ok and found.says.startswith("the clock of n1 is ")
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection(("127.0.0.1", port), 5)


def test_the_secret_is_never_facts_as_dict():
    mine, theirs = socket.socketpair()
    with Connection(mine, 10) as one, Connection(theirs, 10) as other:
        said = {}
        asking = threading.Thread(target=lambda: said.update(one.require_proof(SECRET)))
        asking.start()
        other.prove(SECRET, x=1)
        asking.join(10)
    assert said["x"] == 1
    assert SECRET not in json.dumps(said)


def test_what_is_no_line_of_ours_is_refused():
    for line in (b"", b"no json\n", b"[1]\n", b"{}", b"x" * 2_000_000):
        mine, theirs = socket.socketpair()

        def send(line: bytes = line, theirs: socket.socket = theirs) -> None:
            with contextlib.suppress(OSError), theirs:
                theirs.sendall(line)

        sending = threading.Thread(target=send)
        sending.start()
        with Connection(mine, 10) as talk, pytest.raises(ConnectionError):
            talk.receive()
        sending.join(10)


def type_on(
    stack: ExitStack, folder: Path, node: int, port: int, *words: str, secret: str = SECRET
) -> subprocess.Popen[str]:
    verb = [sys.executable, "-m", "paceline", "doctor", "--quick", "--json", "--nodes", "a,b,c"]
    command = [*verb, "--node", str(node), "--rendezvous", f"127.0.0.1:{port}", *words]
    env = os.environ | {"PACELINE_DOCTOR_SECRET": secret}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
    return stack.enter_context(process)


def test_three_hosts_that_type_the_same_are_looked_at_together(tmp_path: Path):
    port = free_port("127.0.0.1")
    with ExitStack() as stack:
        typed = [type_on(stack, tmp_path, node, port) for node in (2, 0)]
        wait_until(lambda: bool(listening_of(typed[1].pid)) or typed[1].poll() is not None)
        typed.append(type_on(stack, tmp_path, 1, port))  # until it comes, the first one listens
        listeners = set()
        while typed[1].poll() is None:
            listeners |= listening_of(typed[1].pid)
            time.sleep(0.02)
        outs = [process.communicate(timeout=90) for process in typed]
    second, first = json.loads(outs[2][0]), json.loads(outs[1][0])
    found = {one["check"]: one for one in first["findings"]}
    assert (first["hosts"], first["ranks"]) == (3, 3), outs
    assert found["ranks"]["says"] == "all 3 reported, from 3 hosts"
    assert found["ways"]["says"].startswith("all 6 connections between 3 hosts work")
    assert found["versions"]["ok"] and found["clocks"]["ok"]
    assert second == {"ok": first["ok"], "shown_on": "a"}
    assert [process.returncode for process in typed] == [0 if first["ok"] else 1] * 3
    assert listeners and all(
        address.startswith("0100007F:") for address in listeners
    )  # 127.0.0.1, in the kernel's way


def listening_of(pid: int) -> set[str]:
    """Return the addresses at which a process listens."""
    try:
        sockets = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        rows = [
            line.split()
            for kind in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        ]
    except OSError:
        return set()
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_a_host_that_stays_away_or_has_another_secret_is_named(tmp_path: Path):
    port = free_port("127.0.0.1")
    with ExitStack() as stack:
        first = type_on(stack, tmp_path, 0, port, "--wait", "20")
        other = type_on(stack, tmp_path, 1, port, "--wait", "20", secret="wrong")
        out, err = first.communicate(timeout=90)
        refused = other.communicate(timeout=90)
    assert first.returncode == 1, err
    found = {one["check"]: one for one in json.loads(out)["findings"]}
    assert "1-2 of 3 did not report" in found["ranks"]["says"]
    assert (other.returncode, "PACELINE_DOCTOR_SECRET" in refused[1]) == (3, True), refused
