"""Can text from a log move the cursor, or leave its line?"""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from paceline.plot.text import text_curve
from paceline.report.job_logs import tail
from paceline.terminal import fit, plain

HOSTILE = st.text(
    st.characters() | st.sampled_from("\x1b[]()0123;mHJK?\x07\x08\r\n\x9b\x9d\x9c\u202e\u2028\\")
)


@given(HOSTILE)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = plain(text)
    assert not {unicodedata.category(letter) for letter in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert plain(shown) == shown


@given(HOSTILE, st.integers(0, 40))
def test_a_line_is_never_wider_than_it_may_be(text: str, width: int) -> None:
    assert cell_len(fit(text, width)) <= width


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"one\ntwo\nthree\n", ["two", "three"]),
        (b"one\nno end", ["one", "no end"]),
        (b"bar 10 %\rbar 90 %\r\nnext", ["bar 90 %", "next"]),
        (b"\x1b[2J\x1b[Hgone?\n\xff\xfe\n", ["gone?", "\ufffd\ufffd"]),
        (b"", []),
        (b"\n\n", ["", ""]),
    ],
)
def test_the_tail_of_a_log(tmp_path: Path, written: bytes, shown: list[str]) -> None:
    log = tmp_path / "log"
    log.write_bytes(written)
    assert tail(log, 2) == shown


def test_the_tail_of_a_large_log_without_any_line_end_and_of_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000)
    assert len(tail(log, 3)) == 1
    log.write_bytes(b"first\n" + b"y" * 70_000 + b"\nlast\n")
    assert tail(log, 3) == ["last"]
    assert tail(tmp_path / "none", 3) == tail(tmp_path, 3) == []


@given(st.lists(st.floats()), st.integers(1, 30), st.integers(1, 4))
def test_a_curve_has_its_size_whatever_the_losses(
    values: list[float], width: int, height: int
) -> None:
    rows = text_curve(values, width, height)
    assert len(rows) == height
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width
