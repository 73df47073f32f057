"""Is the right rank blamed, from the reports of the ranks?"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.checkpoint import save
from paceline.data.reading import prefetch
from paceline.hang.collectives import _COLLECTIVE_FILES
from paceline.hang.flight_recorder import Collective, collective
from paceline.hang.judge import judge, still_moving
from paceline.hang.proc import GONE, Links, Process
from paceline.hang.processes import WAITS_FOR_PEERS
from paceline.hang.rank_report import (
    RankException,
    RankReport,
    parse_report,
    read_reports,
    write_report,
)
from paceline.hang.stacks import MAIN, PREFETCH_THREAD, SAVE_THREAD, CodeLine, Stack, own_stacks
from paceline.hang.verdict import HangVerdict, read_verdict, write_verdict
from paceline.rundir import RunDir
from paceline.telemetry.pulse import REST_S, Pulse

WHERE = CodeLine("/home/me/data.py", 88, "load_batch", "user")
WAITS = CodeLine("/x/paceline/exact/exchange.py", 108, "advance", "paceline")
SAVES = CodeLine("/x/paceline/checkpoint/save.py", 160, "_hear", "paceline")
WRITES = CodeLine("/x/paceline/checkpoint/local_storage.py", 99, "write", "paceline")


def entry(
    number: int, name: str = "all-reduce", size: int = 3, *, done: bool = False
) -> Collective:
    return Collective("0", number, name, ((size,),), ("Float",), done)


def rank(
    number: int, last: Collective | None, state: str = "stuck", size: int = 4, **more: object
) -> RankReport:
    stack = Stack(MAIN, (WHERE if last is None or last.done else WAITS,))
    return replace(
        RankReport(number, size, "ab"[number // 3], state, 10.0 + number, 51, "step", 6.0, 0.1),  # type: ignore[arg-type]
        stacks=(stack,),
        collectives=(last,) if last else (),
        **({"process": Process(9, 9, "S")} | more),
    )


def after(history: list[Collective], last: Collective, number: int, **more: object) -> RankReport:
    """Return a rank of two that has done all this before."""
    done = [
        replace(entry, number=place, done=True)
        for place, entry in enumerate(history, last.number - len(history))
    ]
    return replace(rank(number, last, size=2, **more), collectives=(*done, last))


def waiting(*numbers: int) -> list[RankReport]:
    return [rank(number, entry(412)) for number in numbers]


DEAD = {"process": Process(9, 9, GONE)}
STOPPED = {"process": Process(9, 9, "T")}
RAISED = {
    "wrong": RankException("ValueError", "Traceback\nValueError: a bad sample", lost_peer=False)
}
LOST = {"wrong": RankException("RuntimeError", "Connection closed by peer", lost_peer=True)}

STEPS = [entry(0), entry(0, "all-gather", 424)] * 3
FIRST = [entry(0, "all-gather", 424)] * 5
CRASHED = {"process": Process(9, 9, GONE), "crash": "Aborted", "state": "running"}


def aborted(number: int) -> RankReport:
    """Return a rank that gloo aborted."""
    inside = CodeLine("/x/torch/distributed/distributed_c10d.py", 3252, "all_reduce", "library")
    return replace(rank(number, None, size=2), stacks=(Stack(MAIN, (WHERE, inside)),), **CRASHED)


def cut_off(number: int, node: str, *unanswered: str, size: int = 3) -> RankReport:
    """Return a rank with the links of its node, each of which has one address."""
    links = Links((f"4.4.4.{number + 1}",), unanswered)
    return replace(rank(number, entry(412), size=size), node=node, links=links)


def in_groups(number: int, *entries: tuple[str, int, bool]) -> RankReport:
    """Return a rank of two nodes with two ranks each, with (group, number, whether completed) of its collectives."""
    made = [Collective(group, count, "all-gather", (), (), done) for group, count, done in entries]
    return replace(rank(number, made[-1]), collectives=tuple(made), node="ab"[number // 2])


NODE, ACROSS = ("node 0", "node 1"), ("local rank 0", "local rank 1")

CASES = {
    "not entered, with an exchange in two levels": (
        [
            in_groups(0, (ACROSS[0], 7, True), (NODE[0], 9, False)),
            in_groups(1, (NODE[0], 8, True), (ACROSS[1], 7, False)),
            in_groups(2, (ACROSS[0], 7, True), (NODE[1], 9, False)),
            in_groups(3, (ACROSS[1], 6, True), (NODE[1], 8, True)),
        ],
        "own code", (3,), "rank 3 (node b) has not entered all-gather 7; it is in load_batch at data.py:88; ranks 0-2 wait for it",
    ),
    "a link, with an exchange in two levels": (
        [
            in_groups(0, (ACROSS[0], 7, True), (NODE[0], 9, False)),
            in_groups(1, (NODE[0], 8, True), (ACROSS[1], 7, False)),
            in_groups(2, (ACROSS[0], 7, True), (NODE[1], 9, False)),
            in_groups(3, (NODE[1], 8, True), (ACROSS[1], 7, False)),
        ],
        "link", (0, 1, 2, 3), "no data moves over the network between a and b",
    ),
    "two groups in another order": (
        [
            replace(in_groups(0, ("2", 7, True), ("1", 7, False)), size=2),
            replace(in_groups(1, ("1", 6, True), ("2", 8, False)), size=2),
        ],
        "own code", (1,), "rank 1 (node a) has not entered all-gather 7",
    ),
    "not entered": (
        [*waiting(0, 1, 2), rank(3, entry(411, done=True))],
        "own code", (3,),
        "rank 3 (node b) has not entered all-reduce 412; it is in load_batch at data.py:88; ranks 0-2 wait for it",
    ),
    "a dead loader": (
        [*waiting(0, 1, 2), rank(3, entry(411, done=True), doing="reading", children=(Process(77, 1, "T"),))],
        "reading", (3,), "it is reading samples, in load_batch at data.py:88, and its process 77 is stopped",
    ),
    "stopped": ([*waiting(0, 2, 3), rank(1, None, "running", **STOPPED)], "stopped", (1,), "rank 1 (node a) is stopped"),
    "killed": ([*waiting(0, 2, 3), rank(1, None, "running", **DEAD)], "gone", (1,), "rank 1 (node a) has exited and does not answer in all-reduce 412"),
    "in native code": ([*waiting(1, 2, 3), rank(0, None, "running")], "silent", (0,), "rank 0 (node a) is unresponsive (its process is sleeping, in native code or cut off)"),
    "never began": (waiting(0, 1, 2), "silent", (3,), "rank 3 has written no report into this run folder"),
    "raised": (
        [*waiting(0, 2), rank(1, entry(411, done=True), "failed", **RAISED), rank(3, entry(412), "failed", **LOST)],
        "exception", (1,), "rank 1 (node a) failed in step 52 with ValueError: a bad sample",
    ),
    "another collective": (
        [*waiting(0, 1, 3), rank(2, entry(412, "all-gather"))],
        "another collective", (2,), "collective mismatch: rank 2 (node a) called all-gather 412, but ranks 0-1, 3 called all-reduce 412",
    ),
    "another shape": (
        [*waiting(0, 1, 3), rank(2, entry(412, size=5))],
        "another shape", (2,), "rank 2 (node a) called all-reduce 412 of 5 Float, but ranks 0-1, 3 called all-reduce 412 of 3 Float; rank 2 is in",
    ),
    "another shape, which the others completed": (
        [*(replace(rank(n, entry(413)), collectives=(entry(412, done=True), entry(413))) for n in (0, 1, 3)), rank(2, entry(412, size=5))],
        "another shape", (2,), "rank 2 (node a) called all-reduce 412 of 5 Float, but ranks 0-1, 3 called all-reduce 412 of 3 Float and completed it",
    ),
    "a mismatch of two ranks": (
        [rank(0, entry(412), size=2), rank(1, entry(412, size=5), size=2)], "another shape", (0, 1), "rank 0 (node a) called all-reduce 412 of 3",
    ),
    "another shape of two ranks, where the steps before tell": (
        [after(STEPS, entry(412), 0), after(STEPS, entry(412, size=5), 1)], "another shape", (1,), "rank 1 (node a) called all-reduce 412 of 5 Float, but rank 0 called",
    ),
    "a collective left out, of two ranks": (
        [after(STEPS, entry(412), 0), after(STEPS, entry(412, "all-gather", 424), 1)], "another collective", (1,), "rank 1 (node a) called all-gather 412",
    ),
    "gloo aborted another rank than the one at fault": (
        [after([*STEPS, entry(0, size=5)], entry(413, "all-gather", 424), 0, state="failed", **LOST), aborted(1)],
        "another shape", (0,), "rank 0 (node a) called all-reduce 412 of 5 Float, but all-reduce 410 of 3 Float in earlier steps; gloo aborted rank 1 (node a)",
    ),
    "gloo aborted the rank at fault": (
        [after([*STEPS, entry(0)], entry(413, "all-gather", 424), 0, state="failed", **LOST), aborted(1)],
        "another shape", (1,), "gloo aborted rank 1 (node a) in load_batch at data.py:88",
    ),
    "gloo aborted one of two ranks in their first such collective": (
        [after(FIRST, entry(412, size=5), 0, state="failed", **LOST), aborted(1)], "another shape", (0, 1), "rank 0 called all-reduce 412 of 5 Float for the first time",
    ),
    "a crash elsewhere": (
        [*waiting(0, 2, 3), replace(rank(1, None), **CRASHED)], "gone", (1,), "rank 1 (node a) crashed in native code (Aborted) in load_batch at data.py:88",
    ),
    "one batch more": (
        [*(replace(rank(n, entry(412, "barrier")), doing="ending") for n in (0, 1, 3)), rank(2, entry(412))],
        "one batch more", (2,), "rank 2 (node a) has one batch more than the others and is in step 52",
    ),
    "one batch more, while the others save": (
        [*(replace(rank(n, entry(411, done=True)), doing="ending") for n in (0, 1, 3)), rank(2, entry(412))],
        "one batch more", (2,), "ranks 0-1, 3 finished after step 51",
    ),
    "one batch less": (
        [*waiting(0, 1, 3), replace(rank(2, entry(411, done=True)), doing="ending")],
        "one batch less", (2,), "rank 2 (node a) finished after step 51, one batch before the others; ranks 0-1, 3 are in step 52",
    ),
    "a slow disk": (
        [
            replace(
                rank(n, entry(411, done=True), doing="ending"),
                stacks=(Stack(MAIN, (SAVES,)), Stack("paceline-save", (WRITES if n == 2 else SAVES,))),
            )
            for n in range(4)
        ],
        "saving", (2,), "rank 2 (node a) cannot finish writing the checkpoint; it is in write at local_storage.py:99",
    ),
    "left": ([*waiting(0, 1, 2), rank(3, None, "left")], "left", (3,), "rank 3 (node b) finished after step 51; ranks 0-2 still wait in all-reduce 412"),
    "a link": (waiting(0, 1, 2, 3), "link", (0, 1, 2, 3), "no data moves over the network between a and b"),
    "a link, of which one side completed": (
        [*waiting(0, 1, 2), rank(3, entry(411))], "link", (3,), "rank 3 (node b) is still in all-reduce 411, which ranks 0-2 have completed",
    ),
    "a node cut off": (
        [cut_off(0, "a", "4.4.4.2"), cut_off(1, "b", "4.4.4.1"), cut_off(2, "c", "4.4.4.2")], "link", (1,), "network partition: rank 1 (node b) is cut off from a and c",
    ),
    "a node cut off, that cannot report": (
        [cut_off(0, "a", "4.4.4.2"), replace(cut_off(1, "b"), state="running"), cut_off(2, "c", "4.4.4.2")], "link", (1,), "rank 1 (node b) is cut off",
    ),
    "a link between two nodes": (
        [cut_off(0, "a", "4.4.4.2", size=2), cut_off(1, "b", size=2)], "link", (0, 1), "network partition between a and b: a gets no answer from b",
    ),
    "nothing": ([rank(n, None, "running") for n in range(4)], "none", (), "no hang detected"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rank_at_fault_is_named(case):
    records, cause, ranks, words = CASES[case]
    verdict = judge(sorted(records, key=lambda record: record.rank))
    assert (verdict.cause, verdict.ranks) == (cause, ranks)
    assert words in verdict.sentence


def test_a_rank_with_progress_is_not_blamed_until_its_report_is_old():
    records = [*waiting(0, 1, 2), rank(3, None, "moving")]
    assert still_moving(records, now_s=14.0) == [3]
    assert still_moving(records, now_s=60.0) == []
    assert judge(records).ranks == (3,)


def test_reports_and_verdicts_are_read_back_and_damaged_ones_are_ignored(tmp_path: Path):
    folder = RunDir(tmp_path / "run")
    record = replace(
        rank(1, entry(3), "failed", size=2, **RAISED),
        stacks=tuple(own_stacks()),
        node="elsewhere",
        links=Links(("4.4.4.2",), ("4.4.4.1",)),
    )
    write_report(folder, record)
    write_report(folder, rank(3, None, "stuck"))
    write_report(folder, replace(rank(0, None, "running", size=2), time_s=99.0))
    folder.hang_record(5).write_text('{"rank": 5}')
    # Of a process that rank 1 has started: it failed in words. Rank 3 is of a larger world, before.
    folder.crash(1).write_text("Fatal Python error: Aborted\n")
    assert [found.rank for found in read_reports(folder)] == [0, 1]
    assert read_reports(folder)[1] == record == parse_report(asdict(record))
    assert folder.hang_record(1).stat().st_mode & 0o777 == 0o600
    assert folder.hang_record(1).parent.stat().st_mode & 0o777 == 0o700
    verdict = HangVerdict("stopped", (1,), (0,), "rank 1 is stopped")
    write_verdict(folder, verdict)
    assert read_verdict(folder) == verdict
    folder.hang_verdict.write_text("[]")
    assert read_verdict(folder) is None


def test_a_crash_in_native_code_leaves_the_stacks(tmp_path: Path):
    folder = RunDir(tmp_path / "run")
    script = """
import faulthandler, os, sys, threading
from pathlib import Path
from paceline.hang.crash import dump_stacks_on_crash
def fall():
    os.abort()
faulthandler.enable()
with dump_stacks_on_crash(Path(sys.argv[1] + "-other"), enabled_by_us=True):
    pass
threading.Thread(target=threading.Event().wait, daemon=True).start()
with dump_stacks_on_crash(Path(sys.argv[1]), enabled_by_us=True):
    with dump_stacks_on_crash(Path(sys.argv[1] + "-foreign"), enabled_by_us=False):
        fall()
"""
    folder.crash(1).parent.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", script, str(folder.crash(1))], stderr=subprocess.DEVNULL, check=False
    )
    write_report(folder, rank(1, None, "running", size=2, **DEAD))
    assert (found := read_reports(folder)[0]).crash == "Aborted"
    assert [stack.places[-1].function for stack in found.stacks if stack.thread == MAIN] == ["fall"]
    assert [path.name for path in folder.crash(1).parent.glob("*crash*")] == ["0001.crash"]
    assert folder.crash(1).stat().st_mode & 0o777 == 0o600


def test_an_entry_of_the_flight_recorder_is_understood():
    facts = {
        "collective_seq_id": 5, "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "input_sizes": [[3]],
        "input_dtypes": ["Float"], "retired": False, "state": "scheduled",
    }  # fmt: skip
    assert collective(facts) == entry(5)


def test_the_usual_step_time_sets_the_limit():
    pulse = Pulse(multiple=3.0)
    assert pulse.limit_s > 100  # nothing is known before the first step
    for step in range(20):
        pulse.step_done(step)
    pulse.begin("step")
    assert REST_S <= pulse.limit_s < REST_S + 60
    pulse.begin("saving", extra_s=500.0)
    assert pulse.limit_s >= REST_S + 500


def test_the_first_step_sets_the_limit_of_the_second(monkeypatch):
    now_s = 10.0
    monkeypatch.setattr("paceline.telemetry.pulse.time.monotonic", lambda: now_s)
    pulse = Pulse(multiple=3.0)
    steps = iter(pulse.reading(range(9)))
    next(steps)
    now_s += 4.0
    pulse.step_done(1)
    next(steps)
    assert pulse.limit_s == REST_S + 3 * 4.0
    now_s += 1.0
    pulse.step_done(2)
    assert pulse.limit_s == REST_S + 3 * 1.0


def functions_that_call(method: str, folder: Path) -> set[str]:
    """Return the functions of a folder that call a method of some object."""
    found = set()
    for path in folder.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and f".{method}(" in ast.unparse(function):
                found.add(function.name)
    return found


def test_the_names_by_which_stacks_are_recognised_exist():
    checkpoint = Path(save.__file__).parent
    waiting = functions_that_call("look", checkpoint)
    assert waiting
    assert waiting <= WAITS_FOR_PEERS
    assert f'name="{SAVE_THREAD}"' in inspect.getsource(save)
    assert f'name="{PREFETCH_THREAD}"' in inspect.getsource(prefetch)
    package = checkpoint.parent
    ours = [name for name in _COLLECTIVE_FILES if name.startswith("/paceline/")]
    assert all((package / name.removeprefix("/paceline/")).is_file() for name in ours)


def test_the_users_line_is_named_with_the_line_of_paceline_that_it_called() -> None:
    loop = CodeLine("/home/me/train.py", 12, "main", "user")
    odd = replace(rank(1, entry(412, "all-gather")), stacks=(Stack(MAIN, (loop, WAITS)),))
    assert odd.where == "advance at exchange.py:108, called in main at train.py:12"
    assert replace(odd, stacks=(Stack(MAIN, (WAITS, loop)),)).where == "main at train.py:12"
    sentence = judge([*waiting(0, 2, 3), odd]).sentence
    assert "rank 1 is in advance at exchange.py:108, called in main at train.py:12" in sentence
