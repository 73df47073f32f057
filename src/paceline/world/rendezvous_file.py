"""How ranks of several nodes find rank 0: it chooses a free port and writes it into a folder that all nodes share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.rundir import make_private, write_whole, writing_to

_STALE_S = 7 * 24 * 3600.0
_PROBLEM = ".problem"


@dataclass(frozen=True)
class Notice:
    """What rank 0 of one start of a job tells the others: where it is, or why the ranks cannot meet."""

    folder: Path
    key: str

    def prepare(self) -> None:
        """Make the folder. Every rank does, for a network file system may remember for long that something was not there."""
        with writing_to(self.folder):
            make_private(self.folder)
            facts = self.folder.lstat()
        mode = facts.st_mode
        if mode & 0o022 or facts.st_uid != os.getuid() or not stat.S_ISDIR(mode):
            raise EnvironmentUnfit(
                f"others may write into {self.folder} (mode {mode & 0o777:o}, owner {facts.st_uid}), so an address found there cannot be trusted",
                fix=f"chmod 700 {self.folder}, or set MASTER_ADDR and MASTER_PORT",
            )

    def publish(self, address: str, port: int) -> None:
        """Say where rank 0 listens; forget earlier starts of this job."""
        with writing_to(self.folder):
            self._sweep()
            write_whole(self.folder / self.key, f"{address} {port}\n".encode())

    def read(self) -> tuple[str, int] | None:
        """Return where rank 0 listens, if it has said so; raise what another rank has complained of."""
        try:
            # A look-up by name may be answered from a memory of "not there"; a list is not.
            names = {file.name for file in self.folder.iterdir()}
            if self.key + _PROBLEM in names:
                raise problem_from(
                    (self.folder / (self.key + _PROBLEM)).read_text(encoding="utf-8")
                )
        except OSError:  # not shared, or not there yet
            return None
        if self.key not in names:
            return None
        with contextlib.suppress(FileNotFoundError, ValueError):
            address, port = (self.folder / self.key).read_text(encoding="utf-8").split()
            return address, int(port)
        return None

    def complain(self, error: PacelineError) -> None:
        """Tell ranks that have not met yet why they never will."""
        with contextlib.suppress(OSError):
            write_whole(self.folder / (self.key + _PROBLEM), problem_text(error).encode())

    def withdraw(self) -> None:
        """Take the address away: all have met, or never will."""
        with contextlib.suppress(OSError):
            (self.folder / self.key).unlink(missing_ok=True)

    def _sweep(self) -> None:
        for file in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if is_earlier(file.name, self.key) or file.stat().st_mtime < time.time() - _STALE_S:
                    file.unlink()


def is_earlier(name: str, key: str) -> bool:
    """Return whether a file is of an earlier start of the same job, all of whose steps have ended by now.

    >>> [is_earlier(name, "slurm-7-0-2") for name in ("slurm-7-0-1", "slurm-7-3-0.problem", "slurm-7-1-2", "slurm-70-0-1")]
    [True, True, False, False]
    """
    mine, theirs = (re.match(r"slurm-(\d+)-\d+-(\d+)(?:\.|$)", text) for text in (key, name))
    return bool(mine and theirs and mine[1] == theirs[1] and int(theirs[2]) < int(mine[2]))


def problem_text(error: PacelineError) -> str:
    """Return an error in a form that other ranks can raise again."""
    return json.dumps({"problem": error.problem, "fix": error.fix, "exit_code": error.exit_code})


def problem_from(text: str) -> PacelineError:
    """Return the error that another rank has told of.

    >>> problem_from(problem_text(ConfigError("no", fix="yes"))).exit_code
    2
    """
    said = json.loads(text)
    kind = ConfigError if said["exit_code"] == ConfigError.exit_code else EnvironmentUnfit
    return kind(str(said["problem"]), fix=str(said["fix"]))
