"""Main program of one rank under srun: `python -m paceline.launch.rank_srun path|module NAME ...`, or `... python INTERPRETER SCRIPT ...`.

srun starts this very process, so signals reach it; it handles them before any slow import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from paceline import handover
from paceline.errors import LOST_PEER, STOPPED, EnvironmentUnfit, PacelineError, Stopped
from paceline.launch.rank_end import leave
from paceline.launch.rank_foreign import become
from paceline.launch.rank_local import format_error, lost_peer, run_target
from paceline.launch.signals import EARLY
from paceline.launch.spec import ANOTHER_PYTHON
from paceline.world.detect import detect_world
from paceline.world.torch_variables import torch_variables

_HARDWARE_ERRORS = (
    "uncorrectable ECC",
    "GPU is lost",
    "fallen off the bus",
    "NVLink error",
    "GPU has fallen",
)


def main() -> None:
    """Run the program as `__main__`; print its exception."""
    EARLY.listen(leave_early)
    _remove_torch_variables()
    _set_torch_variables()
    if sys.argv[1] == ANOTHER_PYTHON:
        become(*sys.argv[2:])
    faulthandler.enable()
    try:
        require_shared_folder()
        run_target(sys.argv[1:])
    except Stopped:
        leave(_stopped())
    except Exception as error:  # noqa: BLE001 - any exception of the script is shown
        _show(error)
        leave(LOST_PEER if lost_peer(error) else getattr(error, "exit_code", 1))
    leave(0)


def require_shared_folder() -> None:
    """Raise EnvironmentUnfit on a node that does not have the folder through which ranks and job report."""
    mark = os.environ.get(handover.STOP_MARK)
    if mark and not Path(mark).parent.is_dir():
        raise EnvironmentUnfit(
            f"{Path(mark).parent} is not on node {socket.gethostname()}; all nodes of a job need it",
            fix="put the runs on a disk that all nodes share: runs=FOLDER",
        )


def _remove_torch_variables() -> None:
    """Remove variables that a shell, or pyxis in an image with torch, has set: those of Slurm count."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            os.environ.pop(name, None)


def _set_torch_variables() -> None:
    """Give a script with its own `init_process_group` what torchrun would; an unfit environment is reported by `join`."""
    with contextlib.suppress(PacelineError):
        world = detect_world(os.environ)
        if world.launcher == "slurm":
            os.environ.update(torch_variables(world, os.environ))


def _stopped() -> int:
    """Write the mark of a run that saved and stopped; return the exit code.

    srun kills all ranks at the first exit code other than 0, so the code is 0 if a mark tells the job.
    """
    mark = os.environ.get(handover.STOP_MARK)
    if not mark:
        return STOPPED
    Path(mark).touch(mode=0o600)
    return 0


def leave_early() -> NoReturn:
    """Exit from a signal handler before the training has started: there is nothing to save.

    The exit code makes srun kill the other ranks: a rank that waits inside torch would not handle the signal.
    If another rank has failed, the signal is from srun, which kills the rest: that is not a stop on request.
    """
    if not _another_rank_failed():
        _stopped()
    os._exit(STOPPED)


def _another_rank_failed() -> bool:
    """Return whether a rank has reported an error, which it does before it exits."""
    mark = Path(os.environ.get(handover.STOP_MARK) or "/nowhere/stopped")
    return any(mark.parent.glob(f"{glob.escape(mark.name)}.*"))


def _show(error: Exception) -> None:
    """Print an error, unless another rank of this job has printed the same text."""
    text = format_error(error)
    if lost_peer(error):
        text = f"lost the connection to another rank: {str(error).splitlines()[0]}"
    if any(error in text for error in _HARDWARE_ERRORS):
        _exclude_node()
    if _is_first_with(text):
        sys.stderr.write(f"\n{_who()}: {text}\n")


def _exclude_node() -> None:
    """Exclude this node from the next start of the job."""
    mark, node = os.environ.get(handover.STOP_MARK), os.environ.get("SLURMD_NODENAME")
    if mark and node:
        with (
            contextlib.suppress(OSError),
            Path(mark).with_name("failed-nodes").open("a", encoding="utf-8") as file,
        ):
            file.write(f"{node}\n")


def _is_first_with(text: str) -> bool:
    mark = os.environ.get(handover.STOP_MARK)
    if not mark:
        return True
    with contextlib.suppress(OSError):
        name = f"{mark}.{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
        os.close(os.open(name, os.O_CREAT | os.O_EXCL, 0o600))
        return True
    return not Path(mark).parent.is_dir()


def _who() -> str:
    with contextlib.suppress(PacelineError):
        return f"rank {detect_world(os.environ).rank} ({socket.gethostname()})"
    return socket.gethostname()


if __name__ == "__main__":
    main()
