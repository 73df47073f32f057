"""An IDX file is read whole, or refused with the reason."""

import gzip
import struct

import pytest

from paceline.data.mnist_idx import read_idx
from paceline.errors import DataError

GOOD = struct.pack(">BBBBII", 0, 0, 8, 2, 2, 3) + bytes(range(6))


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzipped"])
def test_a_good_file_is_read(tmp_path, pack):
    (tmp_path / ("x" if pack(b"")[:2] != b"\x1f\x8b" else "x.gz")).write_bytes(pack(GOOD))
    assert read_idx(tmp_path, "x").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not an IDX file"),
        (b"PK\x03\x04hello", "not an IDX file"),
        (GOOD[:6], "truncated in its header"),
        (GOOD[:-1], "must have 6 bytes"),
        (GOOD + b"x", "must have 6 bytes"),
        (struct.pack(">BBBBII", 0, 0, 8, 2, 2**32 - 1, 2**32 - 1), "must have"),
        (gzip.compress(GOOD, mtime=0)[:-4], "truncated or damaged"),
        (gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 8, "truncated or damaged"),
    ],
)
def test_a_bad_file_says_what_is_wrong_with_it(tmp_path, content, problem):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){problem}") as caught:
        read_idx(tmp_path, "x")
    assert str(tmp_path / "x") in str(caught.value)
    assert "download the file again" in str(caught.value)


def test_a_missing_file_and_a_wrong_checksum_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="neither x nor x.gz(.|\n)*PACELINE_DATA"):
        read_idx(tmp_path, "x")
    (tmp_path / "x").write_bytes(GOOD)
    with pytest.raises(DataError, match="its checksum is not that of x"):
        read_idx(tmp_path, "x", sha256="0" * 64)
