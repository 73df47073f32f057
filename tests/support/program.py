"""The real command line, run as a user would, with a check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forkserver

MARK = "LAUNCHED_BY_TEST"
_FOREIGN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PACELINE_DATA",
    "PYTHONWARNINGS",
)  # fmt: skip
_GONE_WITHIN_S = 60


def around(script: str, words: Iterable[str]) -> list[str]:
    """Return the words of a verb in their order: its options, the script, settings (key=value)."""
    given = list(words)
    settings = [word for word in given if "=" in word]
    return [*(word for word in given if word not in settings), script, *settings]


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Running:
    """A running command; every process that it starts has the mark in its environment."""

    process: subprocess.Popen[str]
    mark: str
    temporary: Path

    def wait(self, timeout_s: float = 120) -> Done:
        out, err = self.process.communicate(timeout=timeout_s)
        return Done(self.process.returncode, out, err)

    def left_over(self) -> list[str]:
        """Return its processes that still run after a moment."""
        limit = time.monotonic() + _GONE_WITHIN_S
        while (alive := processes_with(self.mark)) and time.monotonic() < limit:
            time.sleep(0.05)
        return list(alive.values())


def _restore_interrupts() -> None:
    """Handle signals again that tests in the background, or under nohup, were started to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def started(
    *words: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    options: tuple[str, ...] = (),
    cold: bool = False,
) -> Iterator[Running]:
    """Start `paceline WORDS` in a folder, with its own folder for temporary files; cold: in a new Python process."""
    mark, temporary = uuid.uuid4().hex, folder / "tmp"
    temporary.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    own = {MARK: mark, "TMPDIR": str(temporary), "XDG_DATA_HOME": str(temporary)}
    process = (subprocess.Popen if cold or options else forkserver.Command)(
        [sys.executable, *options, "-m", "paceline", *words],
        cwd=folder, env=clean | own | dict(env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=_restore_interrupts,
    )  # fmt: skip
    with process:
        try:
            yield Running(process, mark, temporary)
        finally:
            process.kill()
            for pid in processes_with(mark):  # none, unless the test fails
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def paceline(*words: str, **how: Any) -> Done:
    """Run `paceline WORDS` to its end; it must leave neither processes nor folders."""
    with started(*words, **how) as running:
        done = running.wait()
        assert running.left_over() == []
        assert list(running.temporary.glob("paceline-*")) == []
        return done


def processes_with(mark: str) -> dict[int, str]:
    """Return the command lines, by process id, of all processes with a mark in their environment or as their name."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_text().replace("\0", " ")
            named = (
                words and (process / "comm").read_text().strip() == mark[: forkserver.COMM_BYTES]
            )
            if named or f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = words
    return found


def wait_until_gone(*pids: int) -> None:
    """Wait until processes have exited. A process loses its environment, and so its mark, a moment before."""
    wait_until(lambda: not any(map(_runs, pids)), f"{pids} are gone")


def _runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def wait_for(*files: Path, timeout_s: float = 90) -> None:
    """Wait until files exist."""
    wait_until(lambda: all(file.exists() for file in files), f"{files} came", timeout_s)


def wait_until(is_so: Callable[[], bool], what: str = "that", timeout_s: float = 90) -> None:
    """Poll a condition until it is true."""
    limit = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < limit, f"not so: {what}"
        time.sleep(0.02)
