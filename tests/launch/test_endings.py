"""Whatever ends the launcher ends every rank, and what ranks started."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.program import Done, paceline, processes_with, started, wait_for, wait_until_gone

SLEEP = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "LEAVES" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
if "NOTES" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: (Path(f"heard-{rank}").touch(), sys.exit(143)))
if "WITH_CHILD" in os.environ:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(f"pid-{rank}.part").write_text(str(os.getpid()))
os.replace(f"pid-{rank}.part", f"pid-{rank}")
time.sleep(600)
"""


def start_sleepers(folder: Path, **env: str):
    (folder / "sleep.py").write_text(SLEEP)
    return started("run", "-n", "2", "sleep.py", folder=folder, env=env, cold=True)


def pids(folder: Path) -> list[int]:
    files = [folder / f"pid-{rank}" for rank in range(2)]
    wait_for(*files)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("number", "manner"),
    [
        (signal.SIGINT, "STUBBORN"),
        (signal.SIGTERM, "STUBBORN"),
        (signal.SIGTERM, "WITH_CHILD"),
        (signal.SIGTERM, "NOTES"),
    ],
)
def test_a_signal_to_the_launcher_reaches_every_rank_and_ends_everything(
    tmp_path: Path, number: signal.Signals, manner: str
) -> None:
    with start_sleepers(tmp_path, **{manner: "1"}) as running:
        ranks = pids(tmp_path)
        running.process.send_signal(number)
        done = running.wait(timeout_s=120)
        assert done.code == 128 + number
        late = "rank 0 and 1 did not exit in time" in done.err
        assert late == (number == signal.SIGTERM and manner == "STUBBORN"), done.err
        heard = {file.name for file in tmp_path.glob("heard-*")}
        assert heard == ({"heard-0", "heard-1"} if manner == "NOTES" else set())
        assert running.left_over() == []
        wait_until_gone(*ranks)
        assert list(running.temporary.iterdir()) == []


@pytest.mark.parametrize("manner", ["", "STUBBORN", "LEAVES"])
def test_stop_after_ends_a_script_that_does_not_know_paceline(tmp_path: Path, manner: str) -> None:
    (tmp_path / "sleep.py").write_text(SLEEP)
    words = ("run", "-n", "2", "--stop-after", "2s", "--max-restarts", "3", "sleep.py")
    with started(*words, folder=tmp_path, env={manner or "NONE": "1"}, cold=True) as running:
        ranks = pids(tmp_path)
        done = running.wait(timeout_s=120)
        deaf = manner == "STUBBORN"
        assert (done.code, "--stop-after" in done.err) == ((143, False) if deaf else (75, True))
        assert running.left_over() == []
        wait_until_gone(*ranks)


def test_a_script_that_ends_before_stop_after_has_finished(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("print('done')\n")
    words = ("run", "--stop-after", "1h", "short.py")
    assert paceline(*words, folder=tmp_path, cold=True) == Done(0, "done\n", "")


def test_a_second_interrupt_while_ranks_are_ended_leaves_nothing_either(tmp_path: Path) -> None:
    with start_sleepers(tmp_path, STUBBORN="1") as running:
        pids(tmp_path)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(timeout_s=120).code == 130
        assert running.left_over() == []
        assert list(running.temporary.iterdir()) == []


def test_a_killed_launcher_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with start_sleepers(tmp_path) as running:
        ranks = pids(tmp_path)
        running.process.kill()
        assert running.left_over() == []
        wait_until_gone(*ranks)


def test_a_launcher_killed_before_its_ranks_have_begun_leaves_none(tmp_path: Path) -> None:
    with start_sleepers(tmp_path) as running:
        while len(processes_with(running.mark)) < 3:
            assert running.process.poll() is None
        running.process.kill()
        running.process.wait()
        assert running.left_over() == []


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text("for number in range(100_000):\n    print('line', number)\n")
    with started("run", "-n", "2", "many.py", folder=tmp_path, cold=True) as running:
        running.process.stdout.readline()
        running.process.stdout.close()
        assert running.process.wait(120) != 0
        assert "Traceback" not in running.process.stderr.read()
        assert running.left_over() == []
        assert list(running.temporary.iterdir()) == []


def test_a_rank_that_leaves_idle_workers_of_a_thread_pool_ends(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import json\n"
        "json.pool = ThreadPoolExecutor(2)  # as torch.compile keeps one in a module\n"
        "print(json.pool.submit(sum, [1, 2]).result())\n"
    )
    with started("run", "pool.py", folder=tmp_path, cold=True) as running:
        assert running.wait(timeout_s=120).code == 0
