"""Start of N ranks on this host, and the end of all when one ends."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from paceline import handover, terminal
from paceline.errors import STOPPED
from paceline.hang.proc import process
from paceline.launch.environment import Master, master_of, rank_environment
from paceline.launch.failure import Failure
from paceline.launch.logs import RankOutput
from paceline.launch.outcome import Rank, any_failed, outcome, progress_of
from paceline.launch.screen import Screen
from paceline.launch.script_folder import log_of, note_end, note_launch
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec

RENDEZVOUS_FILE = "meeting"
_POLL_S = 0.1
_GATHER_S = 1.0  # time for reports of other ranks after the first failure
_CAUSE_S = 5.0  # the same while all failed ranks only lost a peer: the first cause is still exiting
_GRACE_S = 3.0  # time for a rank to exit before it is killed
_SAVE_S = 600.0  # time for ranks that save a checkpoint before they exit

Look = Callable[[Sequence[subprocess.Popen[bytes]]], None]
FoundRun = Callable[[str], None]
"""Is called with the run folder of the ranks, once they have ended; empty: they reported none."""


def launch(
    spec: LaunchSpec,
    screen: TextIO | None = None,
    each_look: Look | None = None,
    signals: StopSignals | None = None,
    found_run: FoundRun | None = None,
) -> Failure | None:
    """Run the ranks of this host until they end; return the first failure. No process is left running.

    A stop signal is passed on to the ranks, which may save before they exit; a second Ctrl-C kills them.
    """
    with _private_folder() as folder, signals or StopSignals() as received:
        rendezvous = folder / RENDEZVOUS_FILE
        ranks: list[Rank] = []
        master = master_of(spec)
        output = Screen(screen)
        output.show_progress(f"starting {spec.size} rank{'' if spec.size == 1 else 's'}")
        try:
            for number in spec.numbers:
                ranks.append(_start(spec, number, folder, output, master))  # noqa: PERF401 - started ranks must be stopped on any error
            dumps = [handover.dump_of(rank.failure_file) for rank in ranks]
            note_launch(spec, [rank.process.pid for rank in ranks], dumps)
            # A training of Paceline stops by itself, after a save.
            _watch(ranks, received, each_look, spec.deadline_s if spec.target.foreign else math.inf)
            note_end(spec, [rank.process.returncode for rank in ranks])
            failure = outcome(spec, ranks, received, rendezvous)
            copies = all(rank.unaware_mark.exists() for rank in ranks)
            if screen is not None and failure is None and copies:
                _warn_about_copies(spec)
        finally:
            _end_all(ranks)
            for rank in ranks:
                rank.output.close()
            output.close()
            run = handover.read_run(handover.run_file(rendezvous)) or spec.folder
            if found_run is not None:
                found_run(run)
        # Only now, when all ranks have ended: a save in progress may have completed meanwhile.
        return failure and replace(failure, progress=progress_of(rendezvous), run=run)


def _warn_about_copies(spec: LaunchSpec) -> None:
    """Say that the script took no notice of the other ranks."""
    name = spec.target.name
    if spec.size > 1 and _can_join(spec):
        terminal.error(
            f"\nwarning: {spec.size} ranks ran {name}, and ended before they called init_process_group\n"
            "  fix: see the lines above; if that is intended, start one rank: -n 1"
        )
    elif spec.size > 1:
        terminal.error(
            f"\nwarning: {spec.size} ranks ran {name}, but it never joined: each did the whole work\n"
            f"  fix: use paceline.Run or call torch.distributed.init_process_group in {name}, "
            "or start one rank: -n 1"
        )


def _can_join(spec: LaunchSpec) -> bool:
    with contextlib.suppress(OSError):  # a module, or a script that is gone
        return b"init_process_group(" in Path(spec.target.argv[-1]).read_bytes()
    return False


def _start(spec: LaunchSpec, number: int, folder: Path, output: Screen, master: Master) -> Rank:
    failure_file = folder / f"failure-{number:04d}.json"
    rendezvous = folder / RENDEZVOUS_FILE
    env = rank_environment(spec, number, rendezvous, failure_file, master)
    if output.columns:
        env[handover.TERMINAL] = str(output.columns)
    process = subprocess.Popen(
        [*spec.target.command, *spec.arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches the launcher only, which stops the ranks in order
    )
    return Rank(
        number,
        process,
        RankOutput(number, spec.size, output, log_of(spec, number)),
        failure_file,
        handover.joined_mark(rendezvous, number),
        handover.graceful_stop_mark(rendezvous, number),
        handover.unaware_mark(failure_file),
        has_reports=not spec.target.interpreter,
    )


def _watch(
    ranks: list[Rank], signals: StopSignals, each_look: Look | None, deadline_s: float
) -> None:
    """Forward output until all ranks have ended, or the time after a failure or a stop request is over."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            os.set_blocking(rank.process.stdout.fileno(), False)
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        limit = math.inf
        while time.monotonic() < limit and signals.interrupts < 2:
            _forward_output(selector)
            if each_look is not None:
                each_look([rank.process for rank in ranks])
            if time.time() >= deadline_s and not signals.count:
                signals.end_time()
            limit = min(limit, time.monotonic() + _time_left(ranks, signals))
            if all(rank.ended_s for rank in ranks):
                break
        _note_ends(ranks)  # the last poll may be long ago, if this process was suspended
        _forward_output(selector, wait_s=0)


def _time_left(ranks: list[Rank], signals: StopSignals) -> float:
    """Return how long the ranks may still run; request a stop if one has stopped or a signal came."""
    failed = _note_ends(ranks)
    if failed and not any(rank.stopped for rank in ranks):
        cause_known = any(rank.process.returncode and not rank.end.lost_peer for rank in ranks)
        may_report = any(_can_respond(rank) for rank in ranks if not rank.ended_s)
        return _CAUSE_S if may_report and not cause_known else _GATHER_S
    if not (failed or signals.count):
        return math.inf
    running = [rank for rank in ranks if not rank.ended_s]
    _request_stop([rank for rank in running if not rank.stop_requested], signals.first)
    one_saved = any(rank.process.returncode == STOPPED for rank in ranks)
    all_save = all(rank.graceful_stop_mark.exists() for rank in running)
    return _SAVE_S if one_saved or all_save else _GRACE_S


def _request_stop(ranks: list[Rank], received: signal.Signals | None) -> None:
    """Signal the ranks only, not their children: a rank stops its own data loader workers.

    A rank that saves first gets the signal that was received, so that it can name it.
    """
    for rank in ranks:
        saves = rank.graceful_stop_mark.exists()
        rank.process.send_signal(received if received and saves else signal.SIGTERM)
        rank.stop_requested = True


def _forward_output(selector: selectors.BaseSelector, wait_s: float = _POLL_S) -> None:
    if not selector.get_map():
        time.sleep(wait_s / 5)
        return
    for key, _ in selector.select(wait_s):
        data = key.fileobj.read()  # type: ignore[union-attr]
        if data:
            key.data.output.feed(data)
        elif data == b"":
            selector.unregister(key.fileobj)


def _note_ends(ranks: list[Rank]) -> bool:
    """Note the time at which ranks ended; return whether any failed."""
    for rank in ranks:
        if not rank.ended_s and rank.process.poll() is not None:
            rank.ended_s = time.time()
    return any_failed(ranks)


def _end_all(ranks: list[Rank]) -> None:
    """Stop every running rank and its children: SIGTERM first, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    _signal([rank for rank in running if not rank.stop_requested], signal.SIGTERM)
    limit = time.monotonic() + _GRACE_S
    for rank in filter(_can_respond, running):
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, limit - time.monotonic()))
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        assert rank.process.stdout is not None
        rank.process.stdout.close()


def _can_respond(rank: Rank) -> bool:
    """Return whether a rank can hear a signal and write a report: not if it is suspended."""
    return process(rank.process.pid).can_respond


def _signal(ranks: list[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the last process of the group has ended
            os.killpg(rank.process.pid, number)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
