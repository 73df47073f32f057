"""Read tokenized text as rows of equal length from one stream, or as one row per file."""

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
    """Tokens in consecutive files."""

    parts: Sequence[str]
    """The files, which contain nothing else."""
    counts: Sequence[int]
    """The number of tokens per file."""
    dtype: str
    starts: Sequence[int]
    """Offset of each document in the stream, and the end of the last."""
    length: int
    """Rows of length + 1 tokens that overlap by one; 0: one row per document."""

    @property
    def samples(self) -> int:
        """The number of rows."""
        return (self.starts[-1] - 1) // self.length if self.length else len(self.starts) - 1

    def read(self, begin: int, end: int) -> Rows:
        """Return some rows."""
        if self.length:
            flat = self._tokens(begin * self.length, end * self.length + 1)
            rows = sliding_window_view(flat, self.length + 1)[:: self.length]
            return {COLUMN: numpy.ascontiguousarray(rows)}
        offsets = numpy.array(self.starts[begin : end + 1], dtype=numpy.int64)
        flat = self._tokens(int(offsets[0]), int(offsets[-1]))
        return {COLUMN: Varying(flat, offsets - offsets[0])}

    @cached_property
    def _ends(self) -> Any:
        return numpy.cumsum(self.counts)

    def _tokens(self, begin: int, end: int) -> Array:
        """Return a range of the stream."""
        dtype = numpy.dtype(self.dtype)
        tokens = numpy.empty(end - begin, dtype=dtype)
        part, at = int(numpy.searchsorted(self._ends, begin, side="right")), begin
        while at < end:
            first = int(self._ends[part]) - self.counts[part]
            count = min(end, int(self._ends[part])) - at
            offset = (at - first) * dtype.itemsize
            read = numpy.fromfile(self.parts[part], dtype, count, offset=offset)
            if len(read) != count:
                raise DataError(
                    f"{self.parts[part]} was truncated while it was packed",
                    fix="repeat the command",
                )
            tokens[at - begin : at - begin + count] = read
            part, at = part + 1, at + count
        return tokens

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Stream:
        """Rebuild the object from the dict of `tree`."""
        return cls(**tree)
