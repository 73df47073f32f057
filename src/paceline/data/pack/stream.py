"""How a text that was made numbers is read: as one stream cut into rows, or as a row for every file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from paceline.data.shards.shard import Array, Rows, Varying
from paceline.errors import DataError

COLUMN = "tokens"


@dataclass(frozen=True)
class Stream:
    """Numbers that lie in files, one after the other."""

    parts: Sequence[str]
    """The files, which hold nothing else."""
    counts: Sequence[int]
    """How many numbers are in each."""
    dtype: str
    starts: Sequence[int]
    """Where each document begins, and where the last ends."""
    length: int
    """Rows of so many, and one more that is the next row's first; 0: a row for every document."""

    @property
    def samples(self) -> int:
        """How many rows there are."""
        return (self.starts[-1] - 1) // self.length if self.length else len(self.starts) - 1

    def read(self, begin: int, end: int) -> Rows:
        """Return some rows."""
        if self.length:
            flat = self._numbers(begin * self.length, end * self.length + 1)
            return {
                COLUMN: numpy.ascontiguousarray(
                    sliding_window_view(flat, self.length + 1)[:: self.length]
                )
            }
        offsets = numpy.array(self.starts[begin : end + 1], dtype=numpy.int64)
        return {
            COLUMN: Varying(self._numbers(int(offsets[0]), int(offsets[-1])), offsets - offsets[0])
        }

    @cached_property
    def _ends(self) -> Any:
        return numpy.cumsum(self.counts)

    def _numbers(self, begin: int, end: int) -> Array:
        """Return a stretch of the stream."""
        dtype = numpy.dtype(self.dtype)
        found = numpy.empty(end - begin, dtype=dtype)
        part, at = int(numpy.searchsorted(self._ends, begin, side="right")), begin
        while at < end:
            first = int(self._ends[part]) - self.counts[part]
            count = min(end, int(self._ends[part])) - at
            piece = numpy.fromfile(
                self.parts[part], dtype, count, offset=(at - first) * dtype.itemsize
            )
            if len(piece) != count:
                raise DataError(
                    f"{self.parts[part]} became shorter while it was packed",
                    fix="run the same command again",
                )
            found[at - begin : at - begin + count] = piece
            part, at = part + 1, at + count
        return found

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Stream:
        """Return what `tree` said."""
        return cls(**tree)
