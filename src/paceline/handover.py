"""Environment variables and files between a launcher and its ranks, named here and nowhere else."""

from __future__ import annotations

import signal
from pathlib import Path

SETTINGS = "PACELINE_SET"
"""Settings of the verb that launched this process, as a JSON object of dotted names; they override all others."""

NEEDS_RUN = "PACELINE_NEEDS_RUN"
"""Set if a verb measures a script that does not mention Paceline: it ends at its first step, unless it has imported it."""

MOST_RANKS = "PACELINE_MOST_RANKS"
"""The largest number of ranks that this launch asks for, if this start has fewer: a new run gets as many lanes."""

MEETING = "PACELINE_MEETING"
"""The file of the rendezvous."""


def joined_mark(rendezvous: Path, rank: int) -> Path:
    """Return the file that a rank creates when it joins the rendezvous."""
    return rendezvous.with_name(f"joined-{rank:04d}")


def unaware_mark(failure_file: Path) -> Path:
    """Return the file that a rank creates at its end if its script could not know which rank it was."""
    return failure_file.with_suffix(".unaware")


def graceful_stop_mark(rendezvous: Path, rank: int) -> Path:
    """Return the file that a rank creates if it saves before it stops: the launcher then waits for it."""
    return rendezvous.with_name(f"graceful-stop-{rank:04d}")


def progress_file(rendezvous: Path) -> Path:
    """Return the file with the step of the newest checkpoint, by which the launcher counts failures without progress."""
    return rendezvous.with_name("progress")


def read_progress(file: Path) -> int:
    """Return the step of the newest checkpoint that the ranks reported; -1 if there is none."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def run_file(beside: Path) -> Path:
    """Return the file with the path of the run folder, for the failure page; it is beside the progress file."""
    return beside.with_name("run")


def read_run(file: Path) -> str:
    """Return the run folder that the ranks reported; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


SEED = "PACELINE_SEED"
"""The seed on the command line of a training, with which a rank seeds Python's generator before the script starts."""

HASH_SEED = "PYTHONHASHSEED"
"""Python's own: with one value in all ranks and starts, a set of strings has the same order in each."""

DUMP = "PACELINE_DUMP"
"""Path without suffix of the files in which a rank of a foreign script dumps its state for `paceline hang`."""

DUMP_SIGNAL = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else 0
"""The signal on which such a rank dumps its own stack: torch, NCCL and Slurm use no real-time signal. 0: no Linux."""


def dump_of(failure_file: Path) -> Path:
    """Return the value of DUMP for the rank with this failure file."""
    return failure_file.with_suffix("")


def stacks_file(dump: Path) -> Path:
    """Return the file with the stack of the main thread, as Python's faulthandler writes it."""
    return dump.with_suffix(".stacks")


def answer_file(dump: Path) -> Path:
    """Return the file with the stacks and collectives of a rank, as JSON."""
    return dump.with_suffix(".answer")


def request_fifo(dump: Path) -> Path:
    """Return the FIFO in which one byte asks for them."""
    return dump.with_suffix(".request")


FAILURE = "PACELINE_FAILURE"
"""The file in which a rank reports its error; the launcher shows the first one."""

LAUNCHER = "PACELINE_LAUNCHER"
"""The process id of the launcher; a rank with another parent has lost it."""

DEADLINE = "PACELINE_DEADLINE"
"""The moment by which the run must have saved and exited, in seconds since 1970."""

STOP_MARK = "PACELINE_STOPPED"
"""The file that a rank creates when it has saved and stopped. It then exits with code 0, because srun kills all ranks
at the first other code."""

PROGRESS = "PACELINE_PROGRESS"
"""The file in which rank 0 writes the step of its newest checkpoint, for the decision about a restart."""

ATTEMPT = "PACELINE_ATTEMPT"
"""The number of earlier starts of these ranks by the launcher; only the first start may discard an existing run."""

INCARNATION = "PACELINE_INCARNATION"
"""The start of a submitted run, as FAMILY:NUMBER; a later start of one family takes the run over."""

HOST_SUFFIX = "PACELINE_HOST_SUFFIX"
"""The suffix of a node's name on the fast network."""

SCRIPT = "PACELINE_SCRIPT"
"""Which script a copy of it is, or the file of a cell: path of the copy, place and project of the script, as JSON."""

SECRET_FILE = "PACELINE_SECRET_FILE"  # noqa: S105 - the name of a variable
"""A file of mode 0600 with a secret that all nodes share: it signs the messages of the rendezvous."""

INTERFACE = "PACELINE_INTERFACE"
"""The network interface between nodes; unset: the one with the route to the peers."""

OWN_MASTER = "PACELINE_OWN_MASTER"
"""Set if MASTER_ADDR and MASTER_PORT are ours, for scripts with their own `init_process_group`; `join` ignores them."""

DOCTOR = "PACELINE_DOCTOR"
"""Address and secret for the report of a rank of `paceline doctor`, as JSON."""

ADDRESS = "PACELINE_ADDRESS"
"""The HOST:PORT of the rendezvous of several hosts without a scheduler."""

TERMINAL = "PACELINE_TERMINAL"
"""The columns of the launcher's terminal, if it writes to one: the ranks themselves write into a pipe."""

FOR_ALL_RANKS = "\x1e"
"""Begins a line of a rank that speaks for all: the launcher shows it without the number of the rank."""

KEYBOARD = "PACELINE_KEYBOARD"
"""The terminal that the launcher was started in, if any: `run.breakpoint` reads from it."""

COMMAND = "PACELINE_COMMAND"
"""The command that launched the ranks, without secrets, for environment.json."""

DATA = "PACELINE_DATA"
"""The folder of data files, set by the user."""
