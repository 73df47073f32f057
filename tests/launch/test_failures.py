"""When one rank ends badly all end, and the first cause is what is shown last."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.failure import RankEnd, find_culprit
from support.program import Done, paceline

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
    "sys.exit": lambda: sys.exit("no data left"),
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

LOOK_FOR_EXIT = "fix: read its last output; if that does not say why, look for sys.exit or os._exit"


@pytest.mark.parametrize(
    ("how", "code", "first_words", "last_words"),
    [
        (
            "raise",
            1,
            "rank 1 crashed with IndexError; the other ranks were stopped",
            "IndexError: list index out of range",
        ),
        (
            "_exit 0",
            1,
            "rank 1 exited with code 0 while other ranks were still training",
            LOOK_FOR_EXIT,
        ),
        ("_exit 3", 3, "rank 1 exited with code 3, without an uncaught exception", LOOK_FOR_EXIT),
        (
            "SIGKILL",
            137,
            "rank 1 was killed (SIGKILL); the other ranks were stopped. Its last output:",
            "fix: check whether the machine ran out of memory",
        ),
        ("sys.exit", 1, "rank 1 exited with code 1, without an uncaught exception", LOOK_FOR_EXIT),
        ("explain", 1, "rank 1 exited with code 1, without an uncaught exception", LOOK_FOR_EXIT),
        (
            "hide",
            3,
            "rank 1 crashed with IndexError; the other ranks were stopped",
            "IndexError: list index out of range",
        ),
    ],
)
def test_a_rank_that_ends_among_others_that_wait_for_it_is_named(
    tmp_path: Path, how: str, code: int, first_words: str, last_words: str
) -> None:
    (tmp_path / "leave.py").write_text(LEAVE)
    done = paceline("run", "-n", "2", "leave.py", folder=tmp_path, env={"HOW": how})
    assert done.code == code
    assert first_words in done.err
    assert done.err.splitlines()[-1].strip().startswith(last_words)
    assert "closed by peer" not in done.err
    assert "trains on" not in done.out
    if how in {"sys.exit", "explain"}:
        assert "  no data left" in done.err.splitlines()


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


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The output when one rank raises and the others would run for ever."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "fail.py").write_text(FAIL_ALONE)
    return paceline("run", "-n", "3", "fail.py", folder=folder, cold=True)


def test_an_exception_of_one_rank_ends_ranks_that_do_not_wait_for_it(failed: Done) -> None:
    assert failed.code == 1


def test_the_traceback_is_the_last_thing_said_and_begins_with_the_script(failed: Done) -> None:
    assert "rank 1 crashed with ValueError; the other ranks were stopped. Traceback:" in failed.err
    assert failed.err.splitlines()[-1] == "ValueError: the inner reason"
    assert "KeyError: 'the outer one'" in failed.err
    frames = [line for line in failed.err.splitlines() if line.lstrip().startswith("File ")]
    assert all("fail.py" in frame for frame in frames)


def test_what_ranks_said_before_stays_on_stdout(failed: Done) -> None:
    assert sorted(failed.out.splitlines()) == [
        "[0] noise of rank 0",
        "[1] about to fail",
        "[2] noise of rank 0",
    ]


def test_a_crash_in_native_code_shows_where_the_script_was(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = paceline("run", "-n", "1", "crash.py", folder=tmp_path, cold=True)
    assert done.code == 128 + signal.SIGSEGV
    assert "rank 0 was killed (SIGSEGV)" in done.err
    assert 'crash.py", line 2' in done.err
    assert "fix: read the lines above" in done.err


@pytest.mark.parametrize(
    ("text", "last_words"),
    [
        ("def f(:\n", "SyntaxError: "),
        (
            "import no_such_module_anywhere\n",
            "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
    ],
)
def test_a_script_that_cannot_begin_says_why_once(
    tmp_path: Path, text: str, last_words: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    done = paceline("run", "-n", "2", "bad.py", folder=tmp_path, cold=True)
    assert (done.code, done.out) == (1, "")
    assert done.err.count(last_words) == 1
    assert done.err.splitlines()[-1].startswith(last_words)


def spoke(
    rank: int, time_s: float, code: int | None = 1, *, known: bool = False, lost_peer: bool = False
) -> RankEnd:
    return RankEnd(
        rank, code, time_s, f"words of {rank}", "ValueError", known, lost_peer, (f"line of {rank}",)
    )


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
        ([spoke(0, 2.0), spoke(1, 1.0)], 1, 1, "rank 1 crashed with ValueError"),
        ([spoke(0, 1.0, lost_peer=True), spoke(1, 2.0)], 1, 1, "words of 1"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 2.0, -9)], 1, 137, "killed (SIGKILL)"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 0.5, 0)], 1, 1, "exited with code 0"),
        ([spoke(0, 1.0, lost_peer=True), spoke(1, 0.5, lost_peer=True)], 1, 1, "words of 1"),
        ([spoke(0, 1.0, lost_peer=True), silent(1, 0.0, RUNNING)], 1, 1, "rank 1 did not respond"),
        ([silent(0, 1.0, 0), silent(1, 2.0, 4)], 1, 4, "code 4, without an uncaught exception"),
        ([silent(0, 1.0, -15), silent(1, 2.0, -11)], 0, 143, "killed (SIGTERM)"),
        ([silent(0, 0.0, RUNNING), spoke(1, 3.0, 2, known=True)], 1, 2, "words of 1"),
        ([spoke(0, 3.0, 3, known=True), spoke(1, 4.0, 3, known=True)], 0, 3, "words of 0"),
        ([silent(0, 1.0, 3)], 0, 3, "  line of 0\n  fix: "),
        ([RankEnd(0, 3, 1.0)], 0, 3, "Its last output: none\n  fix: "),
        ([RankEnd(0, -9, 1.0)], 0, 137, "was killed (SIGKILL). Its last output: none\n  fix: "),
        ([RankEnd(0, 2, 1.0, tail=USAGE)], 0, 2, "rank 0 refused its arguments (code 2)"),
        ([RankEnd(0, 2, 1.0, tail=USAGE)], 0, 2, "\n  fix: correct the words after the script"),
        (
            [RankEnd(0, -6, 1.0, tail=CRASH)],
            0,
            134,
            "\n  collective mismatch?\n  Fatal Python error: Aborted\n  \n  Thread 0x2",
        ),
        ([RankEnd(0, 3, 1.0, tail=USAGE)], 0, 3, "exited with code 3, without an uncaught"),
        ([spoke(0, 1.0, RUNNING)], 0, 1, "words of 0"),
        ([ALIKE, replace(ALIKE, rank=1, time_s=0.5)], 0, 1, "all 2 ranks crashed with ValueError"),
    ],
)
def test_the_first_cause_is_found_among_the_ends_of_all_ranks(
    ranks: list[RankEnd], culprit: int, code: int, words: str
) -> None:
    found = find_culprit(ranks)
    assert (found.rank, found.exit_code) == (culprit, code)
    assert words in found.message


def test_a_known_error_is_shown_without_a_word_around_it() -> None:
    assert find_culprit([spoke(0, 1.0, 2, known=True)]).message == "words of 0"


@pytest.mark.parametrize(
    "ranks", [[silent(0, 1.0, 3)], [spoke(0, 1.0, lost_peer=True), silent(1, 0.0, RUNNING)]]
)
def test_a_foreign_script_gets_no_advice_about_paceline(ranks: list[RankEnd]) -> None:
    advice = find_culprit(ranks, foreign=True).message.partition("fix: ")[2]
    assert "paceline" not in advice
    assert "timeout.step_s" not in advice


@pytest.mark.parametrize("content", ["", "{", '{"time_s": 1.0, "wh'])
def test_a_report_that_is_not_whole_counts_as_silence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "failure"
    file.write_text(content)
    assert RankEnd.read(1, 3, 5.0, file, ("x",)) == RankEnd(1, 3, 5.0, tail=("x",))
