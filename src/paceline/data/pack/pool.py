"""How numbered pieces of work are shared by processes of our own, which are told of it in JSON.

Each is a fresh interpreter: nothing is forked beside running threads, and the caller's script is not imported again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from paceline import errors
from paceline.errors import EnvironmentUnfit, PacelineError

_WORKER = "paceline.data.pack.worker"


class PackTask(Protocol):
    """Work in numbered pieces, each of which may be done anywhere."""

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""

    def run(self, number: int) -> Any:
        """Do a piece; return what JSON can say."""


def run_all(job: PackTask, numbers: Sequence[int], workers: int) -> Iterator[tuple[int, Any]]:
    """Do pieces of a job, in any order; yield each with what came of it."""
    if min(workers, len(numbers)) <= 1:
        yield from ((number, job.run(number)) for number in numbers)
        return
    told = json.dumps(job.tree()).encode() + b"\n"
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_ended_with_us()) for _ in range(min(workers, len(numbers)))
        ]
        selector = stack.enter_context(selectors.DefaultSelector())
        waiting = iter(numbers)
        for process in processes:
            _tell(process, told)
            _tell(process, b"%d\n" % next(waiting))
            selector.register(_pipe(process.stdout), selectors.EVENT_READ, process)
        for _ in numbers:
            process = selector.select()[0][0].data
            answer = _answer(process)
            more = next(waiting, None)
            if more is not None:
                _tell(process, b"%d\n" % more)
            yield answer


@contextlib.contextmanager
def _ended_with_us() -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker, and end it, whatever comes."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # what it was not told any more
            process.communicate()


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    try:
        _pipe(process.stdin).write(line)
        _pipe(process.stdin).flush()
    except BrokenPipeError as error:
        raise _gone(process) from error


def _answer(process: subprocess.Popen[bytes]) -> tuple[int, Any]:
    line = _pipe(process.stdout).readline()
    if not line.endswith(b"\n"):
        raise _gone(process)
    answer = json.loads(line)
    if "problem" in answer:
        kind: type[PacelineError] = getattr(errors, answer["error"], PacelineError)
        raise kind(answer["problem"], fix=answer["fix"])
    return answer["number"], answer["done"]


def _gone(process: subprocess.Popen[bytes]) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"a worker has ended with code {process.wait()}, and did not say why",
        fix="if memory was short, give fewer --workers or smaller shards; the same command goes on where it was",
    )


def _pipe(pipe: Any) -> Any:
    assert pipe is not None
    return pipe
