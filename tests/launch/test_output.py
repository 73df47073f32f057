"""The output of many ranks is one stream of whole lines, each with its rank."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import handover
from paceline.launch.logs import RankOutput
from paceline.launch.screen import Screen
from support.program import Done, paceline

LINES, LENGTH, PIECE = 60, 20_000, 7_919
CHATTER = f"""
import os
rank = os.environ["RANK"].encode()
for number in range({LINES}):
    line = b"%s:%d:%s\\n" % (rank, number, rank * {LENGTH})
    for start in range(0, len(line), {PIECE}):
        os.write(1 + number % 2, line[start : start + {PIECE}])
os.write(1, b"no newline at the end of rank " + rank)
"""


def test_lines_of_two_ranks_at_once_stay_whole_carry_their_rank_and_none_is_lost(
    tmp_path: Path,
) -> None:
    (tmp_path / "chatter.py").write_text(CHATTER)
    done = paceline("run", "-n", "2", "chatter.py", folder=tmp_path, cold=True)
    assert (done.code, done.err) == (0, "")
    for rank in "01":
        mine = f"[{rank}] "
        said = [line[len(mine) :] for line in done.out.splitlines() if line.startswith(mine)]
        assert said[:-1] == [f"{rank}:{number}:{rank * LENGTH}" for number in range(LINES)]
        assert said[-1] == f"no newline at the end of rank {rank}"
    assert len(done.out.splitlines()) == 2 * (LINES + 1)
    (tmp_path / "one.py").write_text("print('alone')\n")  # which needs no prefix
    assert paceline("run", "one.py", folder=tmp_path, cold=True) == Done(0, "alone\n", "")


def test_a_screen_that_cannot_show_a_letter_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(
        "import os\nos.write(1, 'gr\\u00fc\\u00dfe\\n'.encode())\nprint('goes on')\n"
    )
    env = {"PYTHONIOENCODING": "ascii"}
    done = paceline("run", "letters.py", folder=tmp_path, env=env, cold=True)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "goes on"


def shown(pieces: list[bytes]) -> tuple[str, list[str]]:
    screen = io.StringIO()
    output = RankOutput(3, 4, Screen(screen))
    for piece in pieces:
        output.feed(piece)
    output.close()
    return screen.getvalue(), list(output.tail)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\nt", b"wo"], ["one", "two"]),
        ([b"\n\n"], ["", ""]),
        ([b"gr\xc3", b"\xbc\xc3\x9fe\n"], ["gr\u00fc\u00dfe"]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"10 %\r20 %\rdone\n"], ["done"]),
        ([b"10 %\r", b"20 %\r", b"done\n"], ["done"]),
        ([b"from another system\r", b"\n"], ["from another system"]),
        ([b"a line\x0bwith\x85 odd\xe2\x80\xa8ends\n"], ["a line\x0bwith\ufffd odd\u2028ends"]),
        ([], []),
    ],
)
def test_bytes_become_these_lines(pieces: list[bytes], lines: list[str]) -> None:
    assert shown(pieces) == ("".join(f"[3] {line}\n" for line in lines), lines)


@given(
    st.lists(
        st.sampled_from([b"a", b"word ", b"\n", b"\r", b"\r\n", b"\xc3\xbc", b"\xff", b"\0"]),
        max_size=40,
    ).map(b"".join),
    st.data(),
)
def test_any_chopping_of_the_bytes_gives_the_same_lines(data: bytes, choice: st.DataObject) -> None:
    cuts = sorted(choice.draw(st.sets(st.integers(0, len(data)))))
    pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert shown(pieces) == shown([data])


def test_the_tail_keeps_the_last_two_hundred_lines() -> None:
    assert shown([b"".join(b"%d\n" % number for number in range(250))])[1] == [
        str(number) for number in range(50, 250)
    ]


def test_a_line_that_speaks_for_all_ranks_has_no_prefix() -> None:
    line = f"{handover.FOR_ALL_RANKS}epoch 1/3\nmine\n".encode()
    assert shown([line]) == ("epoch 1/3\n[3] mine\n", ["epoch 1/3", "mine"])


def test_a_line_of_gloo_without_news_is_left_out() -> None:
    line = b"[Gloo] Rank 1 is connected to %d peer ranks. Expected number of connected peer ranks is : 3\n"
    assert shown([line % 3, b"mine\n"]) == ("[3] mine\n", ["mine"])
    assert shown([line % 2])[1] == [(line % 2).decode().rstrip()]


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_fits_and_is_erased_before_other_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Tty()
    screen = Screen(stream)
    screen.show_progress("starting 2 ranks")
    assert stream.getvalue() == "\r\x1b[2Kstarting 2 ranks\r"
    bar = "\r\x1b[2Kstep 1/9  loss 0.1\u2026\r"
    for rank, after in ((1, bar.removeprefix("\r\x1b[2K")), (0, "")):
        screen.show_progress("step 1/9  loss 0.12345  9 samples/s", rank=0)
        assert stream.getvalue().endswith(bar)
        screen.line("hello", rank)
        assert stream.getvalue().endswith(f"{bar}\r\x1b[2Khello\n{after}")
    screen.close()
