"""Stacks and collectives of a rank whose script does not use Paceline, dumped when `paceline hang` asks for them.

faulthandler dumps the stacks in a signal handler, without the GIL. torch's flight recorder needs Python, hence a thread:
it sleeps in a read until it is asked, and starts when the script reads its rank, shortly before gloo or NCCL start theirs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
from pathlib import Path

from paceline import handover

THREAD = "paceline-dump"


def dump_stacks_on_signal(dump: Path) -> None:
    """Let the signal of `paceline hang` write the stacks of all threads into a file."""
    with contextlib.suppress(OSError, ValueError):  # without it, the script runs as well
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(handover.stacks_file(dump), flags, 0o600)
        faulthandler.register(handover.DUMP_SIGNAL, file)


def dump_collectives_on_request(dump: Path) -> None:
    """Start a thread that writes the newest collectives into a file whenever it is asked."""
    with contextlib.suppress(OSError, RuntimeError):
        fifo = handover.request_fifo(dump)
        os.mkfifo(fifo, 0o600)
        requests = os.open(
            fifo, os.O_RDWR
        )  # also for writing: without a writer, reads would return at once
        thread = threading.Thread(target=_answer, args=(requests, dump), name=THREAD, daemon=True)
        thread.start()


def _answer(requests: int, dump: Path) -> None:
    file = handover.collectives_file(dump)
    partial = file.with_name(f".{file.name}")
    while os.read(requests, 1):
        with contextlib.suppress(OSError):
            partial.write_text(_collectives(), encoding="utf-8")
            partial.replace(file)


def _collectives() -> str:
    # Only now: a script must not pay for imports that it does not need.
    from dataclasses import asdict

    from paceline.hang.flight_recorder import last_collectives

    return json.dumps([asdict(entry) for entry in last_collectives()])
