"""The programs of a lesson (python, torchrun, paceline) in processes that have imported torch, forked by `paceline lesson`.

As in forkserver.py, this replaces `exec` only: the files that run are the lessons, and the agent is torch's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from support.forkserver import Forked, become_fresh, warm_ranks

_PR_SET_CHILD_SUBREAPER = 36
_AGENTS_OWN = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun's agent handles, besides those of all."""


def warm_programs() -> None:
    """Make the lessons of this process fork their programs."""
    from paceline.course import attempt, run_lesson

    for module in (run_lesson, attempt):
        module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Program})


class Program(Forked):
    """A program that is forked from the process that starts it."""

    def _begin(self, told: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _end_with(_program, told)


class StartedByLesson(Program):
    """What a lesson starts itself: Python is forked, other programs are executed."""

    def _execute_child(self, *given: Any, **more: Any) -> None:
        is_python = given[0][0] == sys.executable
        (super() if is_python else super(Forked, self))._execute_child(*given, **more)


def _program(told: Mapping[str, Any]) -> None:
    if told["start_new_session"]:
        os.setsid()
    streams = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    os.chdir(told["cwd"] or ".")
    become_fresh(
        told["env"], [number if stream == -1 else stream for number, stream in enumerate(streams)]
    )
    for number in _AGENTS_OWN:
        signal.signal(number, signal.SIG_DFL)
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # the one of the process that forked is closed here
    _follow_variables()
    words = [word for word in told["args"] if word != "-u"]
    _python(words)


def _follow_variables() -> None:
    """Heed what torch reads when it is imported."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _python(words: list[str]) -> None:
    if words[1] == "-m":
        _MODULES[words[2]](words[2:])
        return
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(words[1]).parent))
    _keep_groups()
    subprocess.Popen = StartedByLesson
    runpy.run_path(words[1], run_name="__main__")


def _keep_groups() -> None:
    """Let no process group be taken apart: in a fork, gloo's threads sometimes do not end when they are joined."""
    import torch.distributed as dist

    join, kept = dist.init_process_group, []

    def join_and_keep(*given: Any, **more: Any) -> None:
        join(*given, **more)
        kept.append(dist.group.WORLD)

    dist.init_process_group = join_and_keep


def _torchrun(words: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    Rank.nursery = Nursery()
    subprocess_handler.Popen = Rank
    run.main(words[1:])


class Rank(Forked):
    """A rank of torchrun's agent, which has threads, so that it must not fork itself: a process beside it does."""

    nursery: Nursery

    def _begin(self, told: Mapping[str, Any]) -> None:
        self.pid = self.nursery.fork({"args": list(told["args"]), "env": dict(told["env"])})


class Nursery:
    """A process that was forked when the agent had no threads yet, and forks ranks. They become the agent's children."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # the agent inherits those whose parent is gone
        self.agent, mine = socket.socketpair()
        if not os.fork():
            self.agent.close()
            _end_with(self._serve, mine)
        mine.close()

    def fork(self, told: Mapping[str, Any]) -> int:
        """Fork a rank; return its process id."""
        message = json.dumps(told).encode()
        self.agent.sendall(len(message).to_bytes(4, "big") + message)
        answer = self.agent.recv(4)
        assert answer, "the nursery is gone"
        return int.from_bytes(answer, "big")

    @staticmethod
    def _serve(agent: socket.socket) -> None:
        file = agent.makefile("rb")
        while size := file.read(4):
            told = json.loads(file.read(int.from_bytes(size, "big")))
            born, tell = os.pipe()
            if parent := os.fork():
                os.close(tell)
                os.waitpid(
                    parent, 0
                )  # only now is the rank the agent's child: before, its wait would find none
                agent.sendall(os.read(born, 4))
                os.close(born)
                continue
            between = os.getpid()
            if pid := os.fork():
                os.write(tell, pid.to_bytes(4, "big"))
                os._exit(0)
            os.close(born)
            os.close(tell)
            while (
                os.getppid() == between
            ):  # a rank that ends with its parent must not take this one for it
                time.sleep(0.001)
            inherit = {
                "p2cread": -1,
                "c2pwrite": -1,
                "errwrite": -1,
                "cwd": None,
                "start_new_session": True,
            }
            _end_with(_program, inherit | told)


def _paceline(words: list[str]) -> None:
    from paceline.cli.main import main

    warm_ranks()
    sys.argv = words
    main()


_MODULES: dict[str, Callable[[list[str]], None]] = {
    "torch.distributed.run": _torchrun,
    "paceline": _paceline,
}


def _end_with(work: Callable[[Any], None], given: Any) -> NoReturn:
    """Do some work, and end as a program does that has done it."""
    code = 0
    try:
        work(given)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.stderr.write(traceback.format_exc())  # at once, as Python does
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
