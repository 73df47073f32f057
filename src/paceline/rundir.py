"""The files of a run, and how they are written atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import RunConfig
from paceline.errors import EnvironmentUnfit
from paceline.safe_open import read_text

TENSORBOARD = "tensorboard"
"""The subfolder of a profile with the traces for TensorBoard."""

VERDICT_FILE = "verdict.json"
"""The verdict of a profile, in its folder."""

STEP_FILE = "step.json"
"""One step of all ranks, in the folder of a profile."""

CLOCK_MARK = "paceline: clock"
"""The trace event that ties the trace's clock to the rank's clock."""


def times_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's step times for `paceline scale`."""
    return folder / f"{rank:04d}.times"


@dataclass(frozen=True)
class RunDir:
    """The folder of one run; no other code knows its file names."""

    root: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunDir:
        """Return the folder of the run with these settings."""
        return cls(Path(config.runs) / config.name)

    @property
    def config(self) -> Path:
        """The resolved settings; `--config` starts the run again from them."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """The events, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def vocabulary(self) -> Path:
        """The vocabulary of a run that reads text; the files that it names are beside it."""
        return self.root / "vocabulary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, unless `checkpoint.to` names another place."""
        return self.root / "checkpoints"

    @property
    def jobs(self) -> Path:
        """The folder of submitted jobs: the batch script and the log of each."""
        return self.root / "jobs"

    @property
    def job_verdict(self) -> Path:
        """How the last job ended the run, in one line; no further job of the run starts while it exists."""
        return self.jobs / "over"

    @property
    def code(self) -> Path:
        """The folder of the code copies that jobs run."""
        return self.root / "code"

    @property
    def script(self) -> Path:
        """The folder of the script and of the modules beside it, one subfolder for each version that has trained."""
        return self.root / "script"

    @property
    def meetings(self) -> Path:
        """The rendezvous folder, in which ranks of several nodes find the address of rank 0."""
        return self.root / "meetings"

    def beat(self, rank: int) -> Path:
        """Return the heartbeat file of a rank."""
        return self.root / "ranks" / f"{rank:04d}.beat"

    @property
    def rank_times(self) -> Path:
        """Samples of each rank's own time per step."""
        return self.root / "ranks" / "times.jsonl"

    def hang_record(self, rank: int) -> Path:
        """Return the file in which a rank reports where it hangs, or how it ended."""
        return self.root / "hang" / f"{rank:04d}.json"

    def crash(self, rank: int) -> Path:
        """Return the file with the Python stack of a crash in native code."""
        return self.root / "hang" / f"{rank:04d}.crash"

    @property
    def alarm(self) -> Path:
        """The file that a hanging rank touches, so that the others report where they are."""
        return self.root / "hang" / "alarm"

    @property
    def hang_verdict(self) -> Path:
        """The watchdog's verdict on a hang, written while the ranks still ran."""
        return self.root / "hang" / "verdict.json"

    @property
    def failure(self) -> Path:
        """The failure page of the last start."""
        return self.root / "failure.md"

    @property
    def failure_facts(self) -> Path:
        """The same, as JSON."""
        return self.root / "failure.json"

    @property
    def environment(self) -> Path:
        """Versions, machine and environment variables of the last start."""
        return self.root / "environment.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.root / "report.html"

    @property
    def scaling(self) -> Path:
        """The scaling studies; their report and plots are beside it."""
        return self.root / "scaling.json"

    @property
    def verdict(self) -> Path:
        """The verdict of `paceline profile`."""
        return self.profile / VERDICT_FILE

    @property
    def profile_step(self) -> Path:
        """One step of all ranks, from `paceline profile`."""
        return self.profile / STEP_FILE

    @property
    def csv(self) -> Path:
        """The folder of CSV files, with log.to=csv."""
        return self.root / "csv"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard files, with log.to=tensorboard."""
        return self.root / "tensorboard"

    def bookmark(self, service: str) -> Path:
        """Return the file that records which events a logging service has received."""
        return self.root / f"{service}.json"

    @property
    def profile(self) -> Path:
        """The folder of `paceline profile`."""
        return self.root / "profile"

    @property
    def started_over(self) -> Path:
        """The file that names the launch that restarted this run from step 0."""
        return self.root / "started-over"

    def was_begun_anew_by(self, launch: str) -> bool:
        """Return whether an earlier start of this launch or job has begun the run anew, as resume=never asks."""
        return self.started_over.exists() and read_text(self.started_over) == launch

    @property
    def launches(self) -> Path:
        """Starts and exit codes of a script that keeps no run folder itself, one JSON object per line."""
        return self.root / "launches.jsonl"

    @property
    def launch_lock(self) -> Path:
        """The lock file of the launcher that runs such a script, or that restarts a run."""
        return self.root / "launch.lock"

    def log(self, rank: int) -> Path:
        """Return the output of a rank of such a script."""
        return self.root / "ranks" / f"{rank:04d}.log"

    def refuse_links(self) -> None:
        """Raise if a folder of this run is a symbolic link: whoever planted it chose where a run would write."""
        for folder in (
            *(self.checkpoints, self.jobs, self.code, self.meetings, self.csv, self.tensorboard),
            *(
                self.profile,
                self.script,
                self.beat(0).parent,
                self.alarm.parent,
                self.root / "wandb",
            ),
        ):
            if folder.is_symlink():
                raise EnvironmentUnfit(
                    f"{folder} is a symbolic link to {folder.readlink()}; a run does not write through links in its folder",
                    fix="remove the link; to keep checkpoints elsewhere, set checkpoint.to=FOLDER",
                )

    @property
    def lock(self) -> Path:
        """The lock file, held by the process that writes this run."""
        return self.root / "lock"


def profile_facts(folder: Path, rank: int) -> Path:
    """Return the file of a rank's measurements in the folder of a profile."""
    return folder / f"rank-{rank:04d}.json"


@contextlib.contextmanager
def writing_to(
    path: Path, elsewhere: str = "put the run into another folder with runs=FOLDER"
) -> Iterator[None]:
    """Turn an OSError into an error that names the path and a fix."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {path}: {error.strerror or error}",
            fix=f"free disk space, allow writing there, or {elsewhere}",
        ) from None


def make_private(folder: Path) -> Path:
    """Create a folder and its parents, accessible to the owner alone."""
    for part in [*reversed(folder.parents), folder]:
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(20, "a file is in the way", str(folder))
    return folder


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it.

    Without `durable`, it does not wait for the disk and may be lost in a power cut.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
