"""Metrics as CSV: csv/steps.csv and csv/epochs.csv."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.events import EpochDone, Event, RunStarted, StepDone
from paceline.rundir import make_private, write_whole
from paceline.safe_open import open_to_write, read_bytes

_LARGEST_BYTES = 1 << 30

_STEP = ["step", "epoch", "samples", "loss", "lr", "samples_per_s", "mfu", "time_s"]
_EPOCH = ["step", "epoch", "loss", "samples_per_s", "time_s"]


class CsvSink:
    """Appends a row per step event and per epoch; a resumed run first drops the rows after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        make_private(folder)
        self._steps = Table(folder / "steps.csv", _STEP)
        self._epochs = Table(folder / "epochs.csv", _EPOCH)

    def __call__(self, event: Event) -> None:
        """Append a row for a step or an epoch."""
        if isinstance(event, RunStarted):
            for table in (self._steps, self._epochs):
                table.truncate_after(event.from_step)
        elif isinstance(event, StepDone):
            self._steps.append(vars(event))
        elif isinstance(event, EpochDone):
            row = {name: value for name, value in vars(event).items() if name in _EPOCH}
            self._epochs.append(row | dict(event.metrics))

    def close(self, *, failed: bool) -> None:
        """Close both tables."""
        self._steps.close()
        self._epochs.close()


class Table:
    """A CSV file with a step column. New columns are added to its header."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, list(columns)
        self._file = -1

    def truncate_after(self, step: int) -> None:
        """Drop the rows after a step, and an incomplete last row."""
        self.close()
        self._rewrite([row for row in self._read() if int(row["step"]) <= step])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        new = [name for name in row if name not in self._columns]
        if new:
            self.close()
            kept = self._read()
            self._columns += new
            self._rewrite(kept)
        os.write(self._file, _lines(self._columns, [row]))

    def _read(self) -> list[dict[str, str]]:
        try:
            text = read_bytes(self._path, _LARGEST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return []
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        for name in rows.fieldnames or ():
            if name and name not in self._columns:
                self._columns.append(name)
        return [row for row in rows if re.fullmatch(r"[0-9]{1,15}", row.get("step") or "")]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        head = _lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        write_whole(self._path, head + _lines(self._columns, rows))
        self._file = open_to_write(self._path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue().encode()
