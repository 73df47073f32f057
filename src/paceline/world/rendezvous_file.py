"""The file by which the ranks of several nodes find rank 0: it writes its address and port into a shared folder."""

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
from paceline.safe_open import read_text

_STALE_S = 7 * 24 * 3600.0
_ERROR_SUFFIX = ".problem"


@dataclass(frozen=True)
class RendezvousFile:
    """The address of rank 0 for one start of a job, or the error that prevents the rendezvous."""

    folder: Path
    key: str

    def prepare(self) -> None:
        """Create the folder. Every rank does so, because a network file system may cache that it was missing."""
        with writing_to(self.folder):
            make_private(self.folder)
            facts = self.folder.lstat()
        mode = facts.st_mode
        if mode & 0o022 or facts.st_uid != os.getuid() or not stat.S_ISDIR(mode):
            raise EnvironmentUnfit(
                f"other users can write to {self.folder} (mode {mode & 0o777:o}, owner {facts.st_uid}), "
                "so an address found there cannot be trusted",
                fix=f"run `chmod 700 {self.folder}`, or set MASTER_ADDR and MASTER_PORT",
            )

    def publish(self, address: str, port: int, secret: str = "") -> None:
        """Write the address of rank 0 and the secret of this start; remove files of earlier starts of this job."""
        with writing_to(self.folder):
            self._sweep()
            write_whole(self.folder / self.key, f"{address} {port} {secret}\n".encode())

    def read(self) -> tuple[str, int] | None:
        """Return the address of rank 0, None if it is not there yet; raise an error that another rank published."""
        error_name = self.key + _ERROR_SUFFIX
        try:
            # A lookup by name may be answered from a cached "not there"; a listing is not.
            names = {file.name for file in self.folder.iterdir()}
            if error_name in names:
                raise error_from_json(read_text(self.folder / error_name))
        except OSError:  # not shared, or not there yet
            return None
        if self.key not in names:
            return None
        with contextlib.suppress(FileNotFoundError, ValueError):
            address, port, *_ = read_text(self.folder / self.key).split()
            return address, int(port)
        return None

    def secret(self) -> str:
        """Return the secret of this start; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            _, _, secret = read_text(self.folder / self.key).split()
            return secret
        return ""

    def publish_error(self, error: PacelineError) -> None:
        """Tell ranks that still wait why there will be no rendezvous."""
        with contextlib.suppress(OSError):
            write_whole(self.folder / (self.key + _ERROR_SUFFIX), error_to_json(error).encode())

    def remove(self) -> None:
        """Remove the address after the rendezvous."""
        with contextlib.suppress(OSError):
            (self.folder / self.key).unlink(missing_ok=True)

    def _sweep(self) -> None:
        for file in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if is_earlier(file.name, self.key) or file.stat().st_mtime < time.time() - _STALE_S:
                    file.unlink()


def is_earlier(name: str, key: str) -> bool:
    """Return whether a file belongs to an earlier start of the same job, whose steps have all ended.

    >>> [is_earlier(name, "slurm-7-0-2") for name in ("slurm-7-0-1", "slurm-7-3-0.problem", "slurm-7-1-2", "slurm-70-0-1")]
    [True, True, False, False]
    """
    pattern = re.compile(r"slurm-(\d+)-\d+-(\d+)(?:\.|$)")
    own, other = pattern.match(key), pattern.match(name)
    return bool(own and other and own[1] == other[1] and int(other[2]) < int(own[2]))


def error_to_json(error: PacelineError) -> str:
    """Serialize an error for other ranks."""
    return json.dumps({"problem": error.problem, "fix": error.fix, "exit_code": error.exit_code})


def error_from_json(text: str) -> PacelineError:
    """Return the error of another rank.

    >>> error_from_json(error_to_json(ConfigError("no", fix="yes"))).exit_code
    2
    """
    facts = json.loads(text)
    kind = ConfigError if facts["exit_code"] == ConfigError.exit_code else EnvironmentUnfit
    return kind(str(facts["problem"]), fix=str(facts["fix"]))
