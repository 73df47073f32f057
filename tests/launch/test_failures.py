"""When one rank ends badly all end, and the first cause is what is shown last."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.failure import RankEnd, find_culprit
from support.program import paceline

LEAVE = """
import os, signal, sys
import torch.distributed as dist
import paceline
from paceline.world.process_group import join

def hide(answer):
    try:
        [][0]
    except IndexError:
        sys.exit(answer)

ENDS = {
    "raise": lambda: [][0],
    "_exit 0": lambda: os._exit(0),
    "_exit 3": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hide": lambda: hide(3),  # as Hydra does
    "explain": lambda: hide("no data left"),
}

with join(paceline.config_from_argv()) as world:
    print("rank", world.rank, "is here")
    dist.barrier()
    if world.rank == 1:
        ENDS[os.environ["HOW"]]()
    dist.barrier()
    print("rank", world.rank, "trains on")
"""

LOST_INDEX = "IndexError: list index out of range"


@pytest.mark.parametrize(
    ("how", "code", "last_words"),
    [
        ("raise", 1, LOST_INDEX),
        ("_exit 0", 1, "sys.exit or os._exit"),
        ("_exit 3", 3, "sys.exit or os._exit"),
        ("SIGKILL", 137, "ran out of memory"),
        ("explain", 1, "sys.exit or os._exit"),
        ("hide", 3, LOST_INDEX),
    ],
)
def test_a_rank_that_ends_among_others_that_wait_for_it_is_named(
    tmp_path: Path, how: str, code: int, last_words: str
) -> None:
    (tmp_path / "leave.py").write_text(LEAVE)
    done = paceline("run", "-n", "2", "leave.py", folder=tmp_path, env={"HOW": how})
    assert done.code == code
    assert re.search(r"rank 1 (crashed|exited|was killed)", done.err), done.err
    assert last_words in done.err.splitlines()[-1]
    assert "closed by peer" not in done.err
    assert "trains on" not in done.out
    assert ("  no data left" in done.err.splitlines()) == (how == "explain")


def test_a_rank_that_leaves_before_the_others_meet_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        LEAVE.replace("with join", "if os.environ['RANK'] == '1': sys.exit()\nwith join")
    )
    done = paceline("run", "-n", "2", "early.py", folder=tmp_path, cold=True)
    assert done.code == 1
    assert "rank 1 exited with code 0" in done.err


FAIL_ALONE = """
import os, sys, time
from pathlib import Path
said = [Path("said-0"), Path("said-2")]
if os.environ["RANK"] == "1":
    while not all(file.exists() for file in said):
        time.sleep(0.01)
    print("about to fail")
    raise ValueError("the inner reason") from KeyError("the outer one")
print("noise of rank 0", flush=True)
Path("said-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_an_exception_of_one_rank_ends_ranks_that_do_not_wait_for_it_and_is_said_last(
    tmp_path: Path,
) -> None:
    (tmp_path / "fail.py").write_text(FAIL_ALONE)
    failed = paceline("run", "-n", "3", "fail.py", folder=tmp_path, cold=True)
    assert failed.code == 1
    assert "rank 1 crashed with ValueError" in failed.err
    assert failed.err.splitlines()[-1] == "ValueError: the inner reason"
    assert "KeyError: 'the outer one'" in failed.err
    frames = [line for line in failed.err.splitlines() if line.lstrip().startswith("File ")]
    assert all("fail.py" in frame for frame in frames)
    said = ["[0] noise of rank 0", "[1] about to fail", "[2] noise of rank 0"]
    assert sorted(failed.out.splitlines()) == said


def test_a_crash_in_native_code_shows_where_the_script_was(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = paceline("run", "-n", "1", "crash.py", folder=tmp_path, cold=True)
    assert done.code == 128 + signal.SIGSEGV
    assert "rank 0 was killed (SIGSEGV)" in done.err
    assert 'crash.py", line 2' in done.err


NO_MODULE = "ModuleNotFoundError: No module named 'no_such_module_anywhere'"


@pytest.mark.parametrize(
    ("text", "last_words"),
    [("def f(:\n", "SyntaxError: "), ("import no_such_module_anywhere\n", NO_MODULE)],
)
def test_a_script_that_cannot_begin_says_why_once(
    tmp_path: Path, text: str, last_words: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    done = paceline("run", "-n", "2", "bad.py", folder=tmp_path, cold=True)
    assert (done.code, done.out, done.err.count(last_words)) == (1, "", 1)
    assert done.err.splitlines()[-1].startswith(last_words)


def spoke(
    rank: int, time_s: float, code: int | None = 1, *, known: bool = False, lost_peer: bool = False
) -> RankEnd:
    tail = (f"line of {rank}",)
    return RankEnd(rank, code, time_s, f"words of {rank}", "ValueError", known, lost_peer, tail)


def silent(rank: int, time_s: float, code: int | None) -> RankEnd:
    return RankEnd(rank, code, time_s, tail=(f"line of {rank}",))


RUNNING = None
ALIKE = RankEnd(0, 1, 1.0, "the same words", "ValueError")


USAGE = (
    "usage: train.py [-h] steps",
    "train.py: error: the following arguments are required: steps",
)

CRASH = (
    "collective mismatch?",
    "Fatal Python error: Aborted",
    "",
    "Thread 0x1 (most recent call first):",
    *['  File "/lib/paceline/launch/rank_dump.py", line 44 in _answer'] * 30,
    "",
    "Thread 0x2 (most recent call first):",
    '  File "train.py", line 3 in all_reduce',
    *['  File "<frozen runpy>", line 88 in _run_code'] * 30,
    "",
    "Extension modules: numpy, torch (total: 2)",
)


@pytest.mark.parametrize(
    ("ranks", "culprit", "code", "words"),
    [
        ([spoke(0, 2.0), spoke(1, 1.0)], 1, 1, "ValueError"),
        ([spoke(0, 1.0, lost_peer=True), spoke(1, 2.0)], 1, 1, "words of 1"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 2.0, -9)], 1, 137, "SIGKILL"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 0.5, 0)], 1, 1, "code 0"),
        ([spoke(0, 1.0, lost_peer=True), spoke(1, 0.5, lost_peer=True)], 1, 1, "words of 1"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 0.0, RUNNING)], 1, 1, "did not respond"),
        ([silent(0, 1.0, 0), silent(1, 2.0, 4)], 1, 4, "code 4"),
        ([silent(0, 1.0, -15), silent(1, 2.0, -11)], 0, 143, "SIGTERM"),
        ([silent(0, 0.0, RUNNING), spoke(1, 3.0, 2, known=True)], 1, 2, "words of 1"),
        ([spoke(0, 3.0, 3, known=True), spoke(1, 4.0, 3, known=True)], 0, 3, "words of 0"),
        ([silent(0, 1.0, 3)], 0, 3, "  line of 0\n  fix: "),
        ([RankEnd(0, 3, 1.0)], 0, 3, "none\n  fix: "),
        ([RankEnd(0, -9, 1.0)], 0, 137, "none\n  fix: "),
        ([RankEnd(0, 2, 1.0, tail=USAGE)], 0, 2, "refused its arguments (code 2)"),
        (
            [RankEnd(0, -6, 1.0, tail=CRASH)],
            0,
            134,
            "Fatal Python error: Aborted\n  \n  Thread 0x2",
        ),
        ([RankEnd(0, 3, 1.0, tail=USAGE)], 0, 3, "code 3"),
        ([spoke(0, 1.0, RUNNING)], 0, 1, "words of 0"),
        ([ALIKE, replace(ALIKE, rank=1, time_s=0.5)], 0, 1, "all 2 ranks"),
    ],
)
def test_the_first_cause_is_found_among_the_ends_of_all_ranks(
    ranks: list[RankEnd], culprit: int, code: int, words: str
) -> None:
    found = find_culprit(ranks)
    assert (found.rank, found.exit_code) == (culprit, code)
    assert words in found.message


def test_a_known_error_stands_alone_and_a_foreign_script_gets_no_advice_about_paceline() -> None:
    assert find_culprit([spoke(0, 1.0, 2, known=True)]).message == "words of 0"
    for ranks in ([silent(0, 1.0, 3)], [spoke(0, 1.0, lost_peer=True), silent(1, 0.0, RUNNING)]):
        advice = find_culprit(ranks, foreign=True).message.partition("fix: ")[2]
        assert ("paceline" in advice, "timeout.step_s" in advice) == (False, False)


@pytest.mark.parametrize("content", ["", "{", '{"time_s": 1.0, "wh'])
def test_a_report_that_is_not_whole_counts_as_silence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "failure"
    file.write_text(content)
    assert RankEnd.read(1, 3, 5.0, file, ("x",)) == RankEnd(1, 3, 5.0, tail=("x",))
