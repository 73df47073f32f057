"""How one rank of a Slurm step begins and ends: `python -m paceline.launch.rank_srun path|module WHAT ...`.

It is the process that srun starts, so that signals reach it, and it listens before anything slow is imported.
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
from paceline.errors import LOST_PEER, STOPPED, PacelineError, Stopped
from paceline.launch.rank_local import format_error, leave, lost_peer, run_target
from paceline.launch.signals import EARLY
from paceline.world.detect import detect_world

_NODE_AT_FAULT = (
    "uncorrectable ECC",
    "GPU is lost",
    "fallen off the bus",
    "NVLink error",
    "GPU has fallen",
)


def main() -> None:
    """Run the target as the main program; say why if it fails."""
    EARLY.listen(leave_early)
    _forget_what_others_say()
    faulthandler.enable()
    try:
        run_target(sys.argv[1:])
    except Stopped:
        leave(_stopped())
    except Exception as error:  # noqa: BLE001 - whatever the script raises is shown
        _show(error)
        leave(LOST_PEER if lost_peer(error) else getattr(error, "exit_code", 1))
    leave(0)


def _forget_what_others_say() -> None:
    """Drop what a shell, or pyxis in an image with torch, says of this rank: Slurm's own words are what counts."""
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


def _stopped() -> int:
    """Leave the mark of a run that saved and stopped; return the exit code that goes with it.

    srun ends all ranks at the first exit code other than 0, so with a mark to leave, the code is 0.
    """
    mark = os.environ.get(handover.STOP_MARK)
    if not mark:
        return STOPPED
    Path(mark).touch(mode=0o600)
    return 0


def leave_early() -> NoReturn:
    """Leave from within a signal handler: nothing was begun, nothing is to be saved.

    The exit code makes srun end the other ranks: one that waits for this one inside torch would not hear the signal.
    Where another rank has failed, the signal is srun's own, which ends the rest: that is no stop to go on from.
    """
    if not _somebody_failed():
        _stopped()
    os._exit(STOPPED)


def _somebody_failed() -> bool:
    """Return whether a rank has said why it failed, which it does before it leaves."""
    mark = Path(os.environ.get(handover.STOP_MARK) or "/nowhere/stopped")
    return any(mark.parent.glob(f"{glob.escape(mark.name)}.*"))


def _show(error: Exception) -> None:
    """Print a failure, unless another rank of this job has said the very same."""
    text = format_error(error)
    if lost_peer(error):
        text = f"lost another rank: {str(error).splitlines()[0]}"
    if any(sign in text for sign in _NODE_AT_FAULT):
        _blame_node()
    if _first_to_say(text):
        sys.stderr.write(f"\n{_who()}: {text}\n")


def _blame_node() -> None:
    """Have this node left out of the next start."""
    mark, node = os.environ.get(handover.STOP_MARK), os.environ.get("SLURMD_NODENAME")
    if mark and node:
        with (
            contextlib.suppress(OSError),
            Path(mark).with_name("failed-nodes").open("a", encoding="utf-8") as file,
        ):
            file.write(f"{node}\n")


def _first_to_say(text: str) -> bool:
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
        return f"rank {detect_world(os.environ).rank} on {socket.gethostname()}"
    return socket.gethostname()


if __name__ == "__main__":
    main()
