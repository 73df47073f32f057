"""Stacks and collectives of a rank whose script does not use Paceline, dumped when `paceline hang` asks for them.

A thread answers: it sleeps in a read until it is asked. It looks at the other threads while it holds the GIL; looking without it, from a signal handler, ends the
process now and then, because their frames change meanwhile. The signal is for a rank that cannot answer, because native code holds
the GIL. The main thread receives the signal, and writes its own stack only.
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


def dump_stack_on_signal(dump: Path) -> None:
    """Let the signal of `paceline hang` write the stack of the main thread into a file."""
    with contextlib.suppress(OSError, ValueError):  # without it, the script runs as well
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(handover.stacks_file(dump), flags, 0o600)
        faulthandler.register(handover.DUMP_SIGNAL, file, all_threads=False)


def dump_on_request(dump: Path) -> None:
    """Start a thread that writes all stacks and the newest collectives into a file whenever it is asked."""
    with contextlib.suppress(OSError, RuntimeError):
        fifo = handover.request_fifo(dump)
        os.mkfifo(fifo, 0o600)
        requests = os.open(
            fifo, os.O_RDWR
        )  # also for writing: without a writer, reads would return at once
        thread = threading.Thread(target=_answer, args=(requests, dump), name=THREAD, daemon=True)
        thread.start()


def _answer(requests: int, dump: Path) -> None:
    file = handover.answer_file(dump)
    partial = file.with_name(f".{file.name}")
    while os.read(requests, 1):
        with contextlib.suppress(OSError):
            partial.write_text(_state(), encoding="utf-8")
            partial.replace(file)


def _state() -> str:
    # Only now: a script must not pay for imports that it does not need.
    from dataclasses import asdict

    from paceline.hang.flight_recorder import last_collectives
    from paceline.hang.stacks import own_stacks

    stacks = [asdict(stack) for stack in own_stacks()]
    return json.dumps(
        {"stacks": stacks, "collectives": [asdict(one) for one in last_collectives()]}
    )
