"""The folders of a cluster, and its live processes."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.slurm_cluster.settings import Settings

RELAY = "relay"


@dataclass(frozen=True)
class Place:
    """The folder of one cluster."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def nodes(self) -> Path:
        return self.folder / "nodes"

    @property
    def settings_file(self) -> Path:
        return self.folder / "cluster.json"

    @property
    def settings(self) -> Settings:
        """The settings of the running cluster."""
        return Settings.load(self.settings_file)

    def clear(self) -> None:
        """Start empty: Slurm would recover jobs and node states of an earlier cluster."""
        for folder in (self.state, self.nodes, self.run, self.log):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.state, self.run, self.log):
            folder.mkdir(parents=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the cluster: one process at a time may start, stop or change it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def write_pid(self, name: str, pid: int) -> None:
        """Write the pid file of a host or the relay, with the start time of its process."""
        whole = self.run / f".{name}.pid"
        whole.write_text(f"{pid} {started_at(pid)}\n")
        whole.rename(self.run / f"{name}.pid")

    def pid(self, name: str) -> int | None:
        """Return the process ID if the process is alive."""
        try:
            pid, start = map(int, (self.run / f"{name}.pid").read_text().split())
        except (OSError, ValueError):
            return None
        return pid if started_at(pid) == start else None

    def noted(self) -> list[str]:
        """Return the names with a pid file, dead or alive."""
        return sorted(file.stem for file in self.run.glob("[!.]*.pid"))

    def alive(self) -> dict[str, int]:
        """Return the names whose process is alive."""
        return {name: pid for name in self.noted() if (pid := self.pid(name))}

    def forget(self) -> None:
        """Remove all pid files."""
        for name in self.noted():
            (self.run / f"{name}.pid").unlink(missing_ok=True)


def started_at(pid: int) -> int | None:
    """Return the time at which a process started, in ticks; None when there is no such process, or only its corpse.

    It stands beside the pid in each pid file, so that an unrelated process that got the same pid is never signalled.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])
