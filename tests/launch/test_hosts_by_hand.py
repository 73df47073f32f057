"""One command typed on each of several hosts starts one training; a wrong one says what is wrong."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

import pytest

from paceline.world.address import free_port
from support.program import Done, paceline, started

MEET = """
import torch, paceline
from paceline.world.collectives import sum_across
from paceline.world.process_group import join
with join(paceline.config_from_argv()) as world:
    total = sum_across(world, torch.tensor(world.rank + 1.0)).item()
    print(world.rank, world.size, world.local_rank, world.node, world.nodes, world.launcher, total)
"""


FAIL_ONCE = """
import os, time, paceline
from paceline.world.process_group import join
try:
    with join(paceline.config_from_argv()) as world:
        print(world.rendezvous.prefix)
        if world.rank == 1 and not os.path.exists("failed"):
            os.mkdir("failed")
            raise ValueError("once")
except RuntimeError:  # rank 0, which has lost the other one, and serves the store until it is gone
    time.sleep(float(os.environ["LINGERS_S"]))
    raise
"""


def type_on_hosts(folder: Path, *commands: list[str], script: str = MEET, **env: str) -> list[Done]:
    """Type a command on each of some hosts, all of which are this machine; nothing may be left of them."""
    (folder / "meet.py").write_text(script)
    with contextlib.ExitStack() as stack:
        typed = [
            stack.enter_context(started("run", *words, "meet.py", folder=folder, env=env))
            for words in commands
        ]
        ended = [running.wait() for running in typed]
        assert [running.left_over() for running in typed] == [[]] * len(typed)
        assert list(typed[0].temporary.glob("paceline-*")) == []
    return ended


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.ipv6)])
def test_two_hosts_are_one_world(tmp_path: Path, host: str) -> None:
    shared = ["-n", "2", "--nodes", "2", "--rendezvous", f"{host}:{free_port(host.strip('[]'))}"]
    first, second = type_on_hosts(tmp_path, [*shared, "--node", "0"], [*shared, "--node", "1"])
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    said = [line for done in (first, second) for line in sorted(done.out.splitlines())]
    lines = [line for line in said if "[c10d]" not in line]  # torch may find no name for an address
    assert lines == [
        f"[{rank}] {rank} 4 {rank % 2} {rank // 2} 2 paceline 10.0" for rank in range(4)
    ]


def test_hosts_must_agree_how_many_they_are(tmp_path: Path) -> None:
    shared = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port('127.0.0.1')}"]
    first, second = type_on_hosts(
        tmp_path, [*shared, "-n", "1", "--node", "0"], [*shared, "-n", "2", "--node", "1"]
    )
    for done in (first, second):
        assert done.code == 3
        assert re.search(r"2 ranks \(1 per host\).* 4 ranks \(2 per host\)\n  fix: .* -n", done.err)


@pytest.mark.parametrize("lingers_s", ["0", pytest.param("3", marks=pytest.mark.heavy)])
def test_hosts_start_again_together_where_asked_for(tmp_path: Path, lingers_s: str) -> None:
    where = f"127.0.0.1:{free_port('127.0.0.1')}"
    shared = ["--nodes", "2", "--max-restarts", "1", "--rendezvous", where]
    hosts = [[*shared, "--node", str(node)] for node in range(2)]
    first, second = type_on_hosts(tmp_path, *hosts, script=FAIL_ONCE, LINGERS_S=lingers_s)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    for rank, done in enumerate((first, second)):  # torch may say more
        said = [line for line in done.out.splitlines() if "] paceline-" in line]
        assert said == [f"[{rank}] paceline-{start}" for start in range(2)]
    assert "ValueError: once" in second.err


NODE_0, NODE_1, MANY = "--nodes 2 --node 0", "--nodes 2 --node 1", "--rendezvous h:1"
WRONG = {
    "no node": (f"--nodes 2 {MANY}", 2, "--node 0 on the host of --rendezvous, and --node 1 to 1"),
    "no place": (NODE_1, 2, "--rendezvous HOST:PORT"),
    "one host": (MANY, 2, "--nodes N"),
    "too far": (f"--nodes 2 --node 2 {MANY}", 2, "from 0 to 1"),
    "none": ("--nodes 0", 2, "number the hosts"),
    "no port": (f"{NODE_1} --rendezvous host", 2, "HOST:PORT"),
    "port 0": (f"{NODE_1} --rendezvous host:0", 2, "HOST:PORT"),
    "bad port": (f"{NODE_1} --rendezvous host:99999", 2, "HOST:PORT"),
    "bare IPv6": (f"{NODE_1} --rendezvous ::1:29400", 2, "[::1]:29400"),
    "a range": (f"-n 1:2 {NODE_1} {MANY}", 2, "-n 2"),
    "not ours": (f"{NODE_0} --rendezvous 203.0.113.7:29400", 3, "an address of this host"),
    "no such host": (f"{NODE_0} --rendezvous no-such-host.invalid:29400", 3, "--rendezvous"),
}


@pytest.mark.parametrize(("words", "code", "fix"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_says_what_is_wrong(
    tmp_path: Path, words: str, code: int, fix: str
) -> None:
    (tmp_path / "meet.py").write_text("raise SystemExit('started')")
    done = paceline("run", *words.split(), "meet.py", folder=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert fix in done.err.partition("fix: ")[2], done.err


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text("raise SystemExit('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = f"{NODE_0} --rendezvous 127.0.0.1:{taken.getsockname()[1]}".split()
        done = paceline("run", *words, "meet.py", folder=tmp_path)
    assert (done.code, "a free port" in done.err.partition("fix: ")[2]) == (3, True), done.err
