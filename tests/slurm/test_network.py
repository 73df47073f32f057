"""Do hosts without a scheduler train the same, by torchrun and by our own launch, and is a cut noticed in time?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.private_cluster import PrivateCluster
from support.program import MARK, Done, processes_with, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = re.search(
    r"```python\n(\"\"\".*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)[1]
GUIDE = (ROOT / "docs" / "guides" / "slurm.md").read_text(encoding="utf-8")
TRAINING = Path(__file__).resolve().parents[1] / "support" / "training.py"
PROGRAMS = Path(sys.executable).parent
STEP_S = 5
"""How long a rank waits for its peers in the tests of a cut."""
CUT_OFF = (  # a rank may hear of it first from one on its own host that has left
    f"Timed out waiting {STEP_S}000ms|No route to host|Connection timed out"
    "|did not write its part in time|network partition between n[12] and n[12]"
)


def line_of_the_guide(program: str) -> str:
    """Return what is typed on every host, without the script; {node} is the number of the host."""
    line = re.search(rf"^host0\$ ({program} .*) digits.py epochs=3$", GUIDE, re.MULTILINE)[1]
    return line.replace("host0", "n1").replace("--node 0", "--node {node}")


STATIC = "--nnodes 2 --nproc-per-node 2 --node-rank {node} --master-addr n1 --master-port 29500"
WAYS = {
    "c10d": line_of_the_guide("torchrun"),
    "static": f"torchrun {STATIC}",
    "ours": line_of_the_guide("paceline run"),
}


def one_a_host(line: str) -> str:
    """Return a line that starts one rank on each host: as much of a network, for half the processes."""
    return re.sub(r"(-n|--nproc-per-node) 2", r"\1 1", line)


def digest(text: str) -> str:
    found = re.search(r"weights and optimizer state (\w{16})", text)
    assert found, text
    return found[1]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The README's script, and the digest of one process alone."""
    folder = tmp_path_factory.mktemp("digits")
    (folder / "digits.py").write_text(SCRIPT)
    words = [sys.executable, "digits.py", "epochs=1", "name=alone"]
    return folder, digest(subprocess.check_output(words, cwd=folder, text=True))


def type_on(
    hosts: PrivateCluster, node: int, words: list[str], folder: Path, **how: object
) -> Done:
    """Type a line on one host; return how it ended."""
    said = [word.format(node=node) for word in words]
    return hosts.run([str(PROGRAMS / said[0]), *said[1:]], f"n{node + 1}", folder=folder, **how)


def type_on_both(
    hosts: PrivateCluster, words: list[str], folder: Path, **how: object
) -> list[Done]:
    """Type one line on both hosts at once; return how each ended."""
    with ThreadPoolExecutor(2) as both:
        return list(both.map(lambda node: type_on(hosts, node, words, folder, **how), range(2)))


@pytest.mark.heavy  # test_requeue.py trains on two nodes, too
@pytest.mark.namespaces(nodes=2)
@pytest.mark.parametrize(
    ("way", "line", "ranks"),
    [
        ("c10d", WAYS["c10d"], 4),
        ("static", one_a_host(WAYS["static"]), 2),
        ("ours", WAYS["ours"], 4),
    ],
    ids=WAYS,
)
def test_two_hosts_train_the_same(hosts, way: str, line: str, ranks: int, digits: tuple[Path, str]):
    folder, alone = digits
    words = [*line.split(), "digits.py", "epochs=1", f"name={way}"]
    first, second = type_on_both(hosts, words, folder, timeout_s=240)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"{ranks} ranks" in first.out
    assert digest(first.out) == alone
    assert "optimizer state" not in second.out


@pytest.mark.heavy
@pytest.mark.namespaces(nodes=2, delay_ms=3, rate="100mbit")
def test_a_slow_network_changes_no_bit(hosts, digits: tuple[Path, str]):
    folder, alone = digits
    words = [*one_a_host(WAYS["ours"]).split(), "digits.py", "epochs=1", "name=slow"]
    first, second = type_on_both(hosts, words, folder, timeout_s=240)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert digest(first.out) == alone


def processes(mark: str) -> tuple[list[int], list[int]]:
    """Return the launchers and the ranks of a test that are still there."""
    ranks, launchers = [], []
    for pid in processes_with(mark):
        with contextlib.suppress(OSError):
            is_rank = b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
            (ranks if is_rank else launchers).append(pid)
    return launchers, ranks


def wait_until_gone(mark: str, timeout_s: float) -> None:
    """Wait until no rank is left: far less than the 16 minutes of TCP, and far more than a busy machine needs."""
    limit = time.monotonic() + timeout_s
    while left := processes(mark)[1]:
        assert time.monotonic() < limit, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.namespaces(nodes=2)
@pytest.mark.parametrize(
    ("way", "ranks", "slow"),
    [
        pytest.param("c10d", 2, {"SLOW_STEP": "0.02"}, marks=pytest.mark.heavy),
        pytest.param("ours", 4, {"SLOW_STEP": "0.02"}, marks=pytest.mark.heavy),
        ("ours", 2, {"SLOW_SAVE": "2"}),  # ranks wait for each other's files, not in a collective
    ],
)
def test_a_cut_is_an_error_on_every_rank_within_the_time_of_a_step(
    hosts, way: str, ranks: int, slow: dict, tmp_path: Path
):
    mark = f"cut-{way}-{os.getpid()}"
    settings = [f"timeout.step_s={STEP_S}", "batch.global_size=8", "checkpoint.every=5steps"]
    line = WAYS[way] if ranks == 4 else one_a_host(WAYS[way])
    words = [*line.split(), str(TRAINING), *settings, "steps=1000000"]
    how = {"env": {MARK: mark} | slow, "timeout_s": 200}
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(type_on, hosts, node, words, tmp_path, **how) for node in range(2)
        )
        wait_for(*(tmp_path / "marks" / f"save-{rank}" for rank in range(ranks)), timeout_s=100)
        time.sleep(1.5 * ("SLOW_SAVE" in slow))  # the steps until the next save are quick
        hosts.link("n2", "down")
        wait_until_gone(mark, 90)  # torchrun's agent looks after its ranks at its own leisure
        assert first.result().code == 1
        if way == "c10d":
            end_agent(mark)
    assert second.result().code == (1 if way == "ours" else -signal.SIGKILL)
    for done in (first.result(), second.result()):
        assert re.search(CUT_OFF, done.err), done.err


def end_agent(mark: str) -> None:
    """End what hangs on: torchrun's agent that is cut off from its store would wait for TCP to give up."""
    hanging, _ = processes(mark)
    assert hanging
    for pid in hanging:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
