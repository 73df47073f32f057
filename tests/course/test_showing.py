"""Does a lesson explain itself before it runs, show what is new, and leave out noise?"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from paceline.cli.main import run_verb
from paceline.course.catalog import all_lessons, find_lesson
from paceline.course.difference import code_of, difference, new_lines
from paceline.course.output import LessonOutput
from paceline.course.tracks import lesson_after, track_of, tracks
from support.terminal import in_terminal

LESSONS = all_lessons()

FAILED = """\
W1117 16:22:25.973000 486 torch/distributed/run.py:874] Setting OMP_NUM_THREADS
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
rank 1, epoch 1: loss 2.0693rank 0, epoch 1: loss 2.1

Timeout (0:00:05)!
Thread 0x00007f0e9f270b80 (most recent call first):
  File "/x/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/x/torch/_tensor.py", line 623 in backward
  File "/x/lessons/20_hang.py", line 96 in main
  File "/x/lessons/20_hang.py", line 109 in <module>
Timeout (0:00:06)!
Thread 0x00007f9e047fdb80 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/lessons/20_hang.py", line 103 in main
[rank0]: Traceback (most recent call last):
[rank0]:   File "/x/lessons/20_hang.py", line 109, in <module>
[rank0]:     main()
[rank0]:   File "/x/lessons/20_hang.py", line 96, in main
[rank0]:     loss.backward()
[rank0]:     ^^^^^^^^^^^^^^^
[rank0]:   File "/x/torch/_tensor.py", line 623, in backward
[rank0]:     torch.autograd.backward(
[rank0]: RuntimeError: [/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by
  frame #3: c10::Error::Error()
/x/lib/python3.11/site-packages/torch/_fsdp_state.py:331: UserWarning: returned a view
  output = self._register_pre_backward_hook(output)
USDT:2026-11-17 16:56:08 21544:21544 SyncActivityProfilerHandler.cpp:52] profiler_start
E1117 16:23:38.902000 486 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
  File "/x/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
20_hang.py FAILED
============================================================
done
"""


def test_of_a_failed_run_only_what_teaches_is_shown() -> None:
    output = LessonOutput("20_hang.py")
    assert [part for line in FAILED.splitlines() for part in output.feed(line)] == [
        "rank 1, epoch 1: loss 2.0693",
        "rank 0, epoch 1: loss 2.1",
        "--- no step for 0:00:05: the stack, most recent call first ---",
        "  _tensor.py, line 623, in backward",
        "  20_hang.py, line 96, in main",
        "--- no step for 0:00:06: the stack, most recent call first ---",
        "  distributed_c10d.py, line 5356, in barrier",
        "  20_hang.py, line 103, in main",
        "rank 0:   20_hang.py, line 96, in main",
        "rank 0:     loss.backward()",
        "rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:1",
        "done",
    ]


def test_the_difference_turns_the_earlier_lesson_into_this_one() -> None:
    for lesson in LESSONS:
        lines = difference(lesson)
        code, above = code_of(lesson.source)
        if lesson.before is None:
            assert [line.text for line in lines] == code
            assert new_lines(lesson) == []
            continue
        before, _ = code_of(find_lesson(str(lesson.before)).source)
        added = [line.text for line in lines if line.mark == "+"]
        removed = [line.text for line in lines if line.mark == "-"]
        assert len(before) - len(removed) == len(code) - len(added)
        source = lesson.source.splitlines()
        shown = [source[number - 1] for number in new_lines(lesson)]
        assert shown == [text for text in added if text.strip()]
        assert min(new_lines(lesson)) > above


def test_every_part_of_the_docstring_is_found() -> None:
    for lesson in LESSONS:
        assert lesson.prose and {"Expect", "Time"} <= set(lesson.notes)


def test_every_lesson_is_in_one_track() -> None:
    order = [lesson.number for track in tracks() for lesson in track.lessons]
    assert sorted(order) == [lesson.number for lesson in LESSONS]
    assert [track.name for track in tracks()] == ["First steps", "Production", "Scale", "Exactness"]
    assert track_of(find_lesson("13"))[1] == 2


def test_the_next_lesson_follows_the_tracks_and_skips_what_is_done() -> None:
    assert lesson_after(8).number == 12
    assert lesson_after(8, {12, 13}).number == 14
    assert lesson_after(29) is None


def test_a_lesson_that_cannot_run_here_is_explained(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_verb(["lesson", "16"]) == 0
    said = capsys.readouterr().out
    parts = ["Lesson 16: ", "Production, 6 of 8", "New since lesson 15: ", "+ def read_slurm", "Expect: ", "\n$ salloc", "(skipped: needs a Slurm cluster)", "Next: paceline lesson 20"]  # fmt: skip
    places = [said.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert "class Trainer:\n" not in said, "only what is new is shown"
    assert not (tmp_path / "paceline").exists(), "a lesson that was skipped has not run"


def test_on_a_terminal_it_waits_for_the_reader(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path), "PATH": "/nowhere"}
    with in_terminal("lesson", "16", folder=tmp_path, env=env) as screen:
        screen.wait_for(lambda: "Press Enter to run it" in screen.written)
        assert "skipped" not in screen.written
        screen.type_line("")
        assert screen.wait() == 0
        assert "skipped: needs a Slurm cluster" in screen.written
    with in_terminal("lesson", "4", folder=tmp_path, env=env) as screen:
        screen.wait_for(lambda: "Press Enter to run it" in screen.written)
        for _ in range(10):  # readline loses an interrupt that comes while it draws the prompt
            time.sleep(1)
            screen.press_interrupt()
            with contextlib.suppress(AssertionError):
                screen.wait(10)
                break
        assert screen.wait() == 0
        assert "$ torchrun" not in screen.written


def test_frames_that_two_ranks_wrote_into_each_other_are_parted_or_left_out() -> None:
    output = LessonOutput("20_hang.py")
    torn = (
        'Timeout (0:00:05)!\n  File "/x/site-packages/torch/_tensor.py", line 623 in backward'
        '  File "/x/lessons/20_hang.py", line 96 in main\n'
        '  File "/x/site-packages/torch/dis  File "/x/site-packages/a.py", line 3 in f\nt.py", line 7 in barrier\nthe end'
    )
    shown = [line for one in torn.split("\n") for line in output.feed(one)]
    assert [line.strip() for line in shown[1:]] == [
        "_tensor.py, line 623, in backward",
        "20_hang.py, line 96, in main",
        "the end",
    ]


def test_the_native_stack_of_a_rank_of_paceline_run_is_left_out() -> None:
    output = LessonOutput("20_hang.py")
    lines = (
        "[1] [W1117 18:50:01.123456789 TCPStore.cpp:106] [c10d] recvValue failed",
        "[1] Exception raised from recvBytes at /x/Utils.hpp:679 (most recent call first):",
        "[1] frame #0: c10::Error::Error() + 0x9c (0x7f in /x/site-packages/torch/lib/libc10.so)",
        "[0] /x/site-packages/torch/autograd/graph.py:83: UserWarning: a warning",
        "[0]   its source line",
        "[0] step 3",
    )
    assert [shown for line in lines for shown in output.feed(line)] == ["[0] step 3"]
