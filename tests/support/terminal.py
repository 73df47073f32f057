"""A terminal for a command under test: what it writes, and what would be seen of it."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path


class Terminal:
    """The person's side of a pseudo terminal."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process, self._side, self.written = process, side, ""
        self._rows = 30
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, seconds: float = 0.1) -> str:
        """Take what comes in a moment; return all that came so far."""
        if select.select([self._side], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # the command has ended
                self.written += self._decoder.decode(
                    os.read(self._side, 1 << 16)
                )  # a letter may come in two parts
        return self.written

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        limit = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < limit, self.frame()
            self.read()

    def frames(self) -> list[str]:
        """Return what was drawn each time, without colors."""
        drawn = self.written.partition("\x1b[?1049l")[0].split("\x1b[H")[1:]
        return [_without_orders(frame) for frame in drawn]

    def frame(self) -> str:
        """Return the last frame in which all rows were drawn."""
        rows = self._rows
        whole = [frame for frame in self.frames() if frame.count("\n") >= rows - 1]
        return whole[-1] if whole else ""

    def left(self) -> str:
        """Return what is on the terminal after the live view was left."""
        return _without_orders(self.written.partition("\x1b[?1049l")[2])

    def resize(self, columns: int, rows: int) -> None:
        self._rows = rows
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press_interrupt(self) -> None:
        os.write(self._side, b"\x03")

    def type_line(self, text: str) -> None:
        """Type a line, and the return key."""
        self.type_keys(f"{text}\n")

    def type_keys(self, text: str) -> None:
        """Type letters, and no return key."""
        os.write(self._side, text.encode())

    def wait(self, timeout_s: float = 120) -> int:
        """Return the exit code, all output read."""
        self.wait_for(lambda: self.process.poll() is not None, timeout_s)
        while len(self.written) < len(self.read(0.2)):
            pass
        return self.process.returncode


def _without_orders(text: str) -> str:
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").split("\n")
    return "\n".join(line.rstrip() for line in lines)


def _environment() -> dict[str, str]:
    """Return the environment without what would tell rich of another terminal."""
    foreign = ("LINES", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "FORCE_COLOR")
    own = {name: value for name, value in os.environ.items() if name not in foreign}
    return own | {"TERM": "xterm"}


@contextlib.contextmanager
def in_terminal(
    *words: str, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run `paceline WORDS` in a terminal of 100 columns and 30 rows."""
    command = [sys.executable, "-m", "paceline", *words]
    with program_in_terminal(command, folder=folder, env=env) as terminal:
        yield terminal


@contextlib.contextmanager
def program_in_terminal(
    command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a program, such as a shell, in the same."""
    person, program = pty.openpty()
    fcntl.ioctl(person, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    def take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command,
        cwd=folder, env=_environment() | dict(env or {}),
        stdin=program, stdout=program, stderr=program, start_new_session=True, preexec_fn=take_terminal,  # noqa: PLW1509
    )  # fmt: skip
    os.close(program)
    with process:
        try:
            yield Terminal(process, person)
        finally:
            process.kill()
            process.wait()
            os.close(person)
