"""Run numbered tasks in worker processes, which receive them as JSON.

Each worker is a new interpreter: nothing is forked beside running threads, and the script of the
caller is not imported.
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
    """A job of numbered tasks, which any process can run."""

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""

    def run(self, number: int) -> Any:
        """Run one task; return a JSON-serializable result."""


def run_all(job: PackTask, numbers: Sequence[int], workers: int) -> Iterator[tuple[int, Any]]:
    """Run tasks of a job in any order; yield the number and result of each."""
    if min(workers, len(numbers)) <= 1:
        yield from ((number, job.run(number)) for number in numbers)
        return
    description = json.dumps(job.tree()).encode() + b"\n"
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_worker()) for _ in range(min(workers, len(numbers)))]
        selector = stack.enter_context(selectors.DefaultSelector())
        waiting = iter(numbers)
        for process in started:
            _send(process, description)
            _send(process, b"%d\n" % next(waiting))
            selector.register(_pipe(process.stdout), selectors.EVENT_READ, process)
        for _ in numbers:
            process = selector.select()[0][0].data
            answer = _answer(process)
            more = next(waiting, None)
            if more is not None:
                _send(process, b"%d\n" % more)
            yield answer


@contextlib.contextmanager
def _worker() -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker process, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # input that it no longer read
            process.communicate()


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    try:
        _pipe(process.stdin).write(line)
        _pipe(process.stdin).flush()
    except BrokenPipeError as error:
        raise _worker_died(process) from error


def _answer(process: subprocess.Popen[bytes]) -> tuple[int, Any]:
    line = _pipe(process.stdout).readline()
    if not line.endswith(b"\n"):
        raise _worker_died(process)
    answer = json.loads(line)
    if "problem" in answer:
        kind: type[PacelineError] = getattr(errors, answer["error"], PacelineError)
        raise kind(answer["problem"], fix=answer["fix"])
    return answer["number"], answer["done"]


def _worker_died(process: subprocess.Popen[bytes]) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"a worker died with exit code {process.wait()} and no message",
        fix="if memory ran out, use fewer --workers or smaller shards; repeat the command to resume",
    )


def _pipe(pipe: Any) -> Any:
    assert pipe is not None
    return pipe
