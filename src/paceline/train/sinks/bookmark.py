"""How far a run was told to a service that forgets nothing: so that a resumed run tells no step twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

_WIDTH = 120


class Bookmark:
    """The service's own name of the run, and the last step it was told, in a small file that outlives the process.

    It is written in place and not flushed to disk: after a power cut a few steps may be told again.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.name, self._steps = "", dict[str, int]()
        self._read()

    def _read(self) -> None:
        try:
            found = json.loads(os.pread(self._file, 1 << 16, 0))
            self.name, self._steps = (
                str(found["name"]),
                {kind: int(step) for kind, step in found["steps"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            self.name, self._steps = "", {}

    def begin(self, fresh: Callable[[], str], *, anew: bool) -> str:
        """Return the name under which the run goes on, or begins."""
        if anew or not self.name:
            self.name, self._steps = fresh(), {}
            self._write()
        return self.name

    def passes(self, kind: str, step: int) -> bool:
        """Return whether a step of a kind of event is new, and remember it."""
        if step <= self._steps.get(kind, -1):
            return False
        self._steps[kind] = step
        self._write()
        return True

    def _write(self) -> None:
        """Write one line, padded so that a shorter one leaves nothing of a longer one behind."""
        text = json.dumps({"name": self.name, "steps": self._steps}).ljust(_WIDTH)
        os.pwrite(self._file, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
