"""The last step that was sent to an append-only service, so that a resumed run sends no step twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from paceline.safe_open import open_to_write, parse_json

_WIDTH = 120


class Bookmark:
    """The service's identifier of the run and the last steps sent, in a small file that outlives the process.

    It is written in place and not flushed to disk: after a power cut a few steps may be sent twice.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_write(path, os.O_RDWR)
        self.name, self._steps = "", dict[str, int]()
        self._read()

    def _read(self) -> None:
        try:
            stored = parse_json(os.pread(self._file, 1 << 16, 0))
            steps = {kind: int(step) for kind, step in stored["steps"].items()}
            self.name, self._steps = str(stored["name"]), steps
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self.name, self._steps = "", {}

    def begin(self, create: Callable[[], str], *, is_new: bool) -> str:
        """Return the identifier of the run to continue, or of one that `create` begins."""
        if is_new or not self.name:
            self.name, self._steps = create(), {}
            self._write()
        return self.name

    def passes(self, kind: str, step: int) -> bool:
        """Return whether a step of this kind of event was not sent yet, and remember it."""
        if step <= self._steps.get(kind, -1):
            return False
        self._steps[kind] = step
        self._write()
        return True

    def _write(self) -> None:
        """Write one line, padded so that it overwrites a longer one."""
        text = json.dumps({"name": self.name, "steps": self._steps}).ljust(_WIDTH)
        os.pwrite(self._file, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
