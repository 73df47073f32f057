"""`paceline WORDS` in processes that have imported torch: a server forks the command, and the command forks its ranks.

This replaces `exec` and the two seconds that Python and torch need to start. Launcher, ranks, signals, exit codes and
output are those of the program. All processes share one hash seed, so some tests run it cold: those of launch/, the
lines of the README, and all on emulated hosts.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from support.processes import CONTEXT

COMM_BYTES = 15
_PR_SET_NAME = 15
_OPEN_FILES = 4096
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)


class Forked(subprocess.Popen):
    """A process with its own way to start; everything else is inherited."""

    def _execute_child(self, *given: Any, **more: Any) -> None:
        told = _ARGUMENTS.bind(self, *given, **more).arguments
        self._begin(told)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[name] for name in pipes))

    def _begin(self, told: Mapping[str, Any]) -> None:
        raise NotImplementedError


class Command(Forked):
    """`python -m paceline WORDS`, forked from the server of this test process, so not a child of it."""

    def _begin(self, told: Mapping[str, Any]) -> None:
        words = told["args"][told["args"].index("paceline") + 1 :]
        streams = [_Stream(told[name]) for name in ("p2cread", "c2pwrite", "errwrite")]
        given = (words, Path(told["cwd"]), dict(told["env"]), streams)
        self._server = CONTEXT.Process(
            target=_command, args=given
        )  # no daemon: that could have no workers
        self._server.start()
        self.pid = self._server.pid

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._server.join(0 if wait_flags else None)
        code = self._server.exitcode
        if code is None:
            return 0, 0
        return self.pid, code << 8 if code >= 0 else -code

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


class _Stream:
    """A file descriptor for a process that the server forks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _Stream._received, (reduction.DupFd(self.number),)

    @staticmethod
    def _received(handed: Any) -> _Stream:
        return _Stream(handed.detach())


def _command(words: list[str], folder: Path, env: dict[str, str], streams: list[_Stream]) -> None:
    from paceline.cli.main import main
    from support.forkserver_course import warm_programs
    from support.program import MARK

    become_fresh(env, [stream.number for stream in streams])
    ctypes.CDLL(None).prctl(
        _PR_SET_NAME, env[MARK][:COMM_BYTES].encode()
    )  # ranks that are forked bear it as well
    os.chdir(folder)
    sys.argv = ["paceline", *words]
    warm_ranks()
    warm_programs()
    main()


def warm_ranks() -> None:
    """Make the launcher of this process fork its ranks."""
    from paceline.launch import supervisor

    supervisor.subprocess = SimpleNamespace(
        **vars(subprocess) | {"Popen": Rank}
    )  # for this module alone


class Rank(Forked):
    """A rank as the launcher starts it, forked from the launcher itself."""

    def _begin(self, told: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _as_new_process(_rank, told)


def _rank(told: Mapping[str, Any]) -> None:
    from paceline.launch.rank_local import main

    os.setsid()
    become_fresh(told["env"], [told["p2cread"], told["c2pwrite"], told["errwrite"]])
    sys.path.insert(0, os.getcwd())
    for name in [name for name in sys.modules if name.startswith("paceline.recipes.")]:
        del sys.modules[name]  # one of them may be what is to run
    sys.argv = told["args"][told["args"].index("paceline.launch.rank_local") :]
    main()


def _as_new_process(work: Callable[..., None], *given: Any) -> NoReturn:
    try:
        work(*given)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def become_fresh(env: Mapping[str, str], streams: list[int]) -> None:
    """Reset this process to the state after a start: streams, variables, signal handlers, finalizers, random seeds.

    Its objects are frozen: a look at them all would copy their memory from the parent.
    """
    gc.freeze()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, _OPEN_FILES)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # they belong to the parent
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
