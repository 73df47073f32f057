"""Groups of ranks that train one combination after another: processes forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
_TIMEOUT_S = 240.0
_PATIENCE_S = 5.0  # for the other ranks, after one has failed


def preload() -> None:
    """Let the server import torch before it forks the first rank."""
    CONTEXT.set_forkserver_preload(
        ["paceline.train.trainer", "torch._dynamo", "torch.distributed.fsdp"]
    )


class Answer(NamedTuple):
    """What a rank says of a training."""

    kind: str
    """trained, refused, traceback or blocked."""
    message: str
    """The error; empty without one."""
    updates: int
    """Updates before the error."""
    record: dict[str, str]


class RankGroup:
    """Some ranks that wait for trainings; after an error they are replaced by new ones."""

    def __init__(self, size: int, folder: Path, device: str = "cpu") -> None:
        self._size, self._folder, self._device = size, folder, device
        self._ranks: list[tuple[Any, Connection]] = []

    def train(self, name: str, runs: Path, stop_at: int) -> list[Answer]:
        """Train a combination on all ranks; return the answer of each."""
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(self._size)]
        rendezvous = self._folder / f"rendezvous-{os.urandom(6).hex()}"
        rendezvous.mkdir(mode=0o700)
        for _, pipe in self._ranks:
            pipe.send((name, runs, stop_at, rendezvous / "file", self._device))
        answers = self._collect()
        if any(answer.kind != "trained" for answer in answers):
            self.close()
        return answers

    def _start(self, rank: int) -> tuple[Any, Connection]:
        mine, theirs = CONTEXT.Pipe()
        log = self._folder / f"rank-{self._size}-{rank}.log"
        # Not daemons: these could not have read workers.
        process = CONTEXT.Process(target=_serve, args=(rank, self._size, theirs, log))
        process.start()
        theirs.close()
        return process, mine

    def _collect(self) -> list[Answer]:
        """Wait for all ranks; for a short time only after one of them has failed."""
        answers: dict[int, Answer] = {}
        until = time.monotonic() + _TIMEOUT_S
        while len(answers) < self._size and time.monotonic() < until:
            for rank, (_, pipe) in enumerate(self._ranks):
                if rank not in answers and pipe.poll(0.01):
                    answers[rank] = _received(pipe)
                    if answers[rank].kind != "trained":
                        until = min(until, time.monotonic() + _PATIENCE_S)
        blocked = Answer("blocked", "the rank did not answer", 0, {})
        return [answers.get(rank, blocked) for rank in range(self._size)]

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in self._ranks:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(0.5)
            process.kill()
            process.join()
        self._ranks = []


def _received(pipe: Connection) -> Answer:
    try:
        answer: Answer = pipe.recv()
    except (EOFError, OSError):
        return Answer("traceback", "the process ended", 0, {})
    return answer


def _serve(rank: int, size: int, pipe: Connection, log: Path) -> None:
    """Train what is asked for until the pipe is closed."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with contextlib.suppress(EOFError, OSError):
        while (job := pipe.recv()) is not None:
            pipe.send(_answer(*job))
    pipe.close()


def _answer(name: str, runs: Path, stop_at: int, rendezvous: Path, device: str) -> Answer:
    from combinations.table import find
    from combinations.training import Progress, train

    from paceline import handover
    from paceline.errors import PacelineError

    os.environ[handover.MEETING] = str(rendezvous)
    os.chdir(rendezvous.parent)
    progress = Progress()

    def result(kind: str, message: str = "") -> Answer:
        return Answer(kind, message, progress.updates, progress.record)

    try:
        train(find(name), runs, stop_at, progress, device)
    except PacelineError as error:
        return result("refused", str(error))
    except BaseException as error:  # noqa: BLE001 - the table must show any
        traceback.print_exc()
        sys.stderr.flush()
        return result("traceback", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return result("trained")
