"""Where the files of a run lie, and how a file comes to exist only when it is whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import RunConfig
from paceline.errors import EnvironmentUnfit

RECORD_FILE = "record.jsonl"
"""What `paceline verify` compares, in a folder of its own."""

DUMP_FILE = "tensors.safetensors"
"""All tensors after one step, for the size of a difference."""

TENSORBOARD = "tensorboard"
"""The folder of the traces that TensorBoard reads, in that of a profile."""

VERDICT_FILE = "verdict.json"
"""What a profile found, in its folder."""

CLOCK_MARK = "paceline: clock"
"""The event of a trace whose moment is known by the clock of the rank, too."""


def times_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes the times of its steps for `paceline scale`."""
    return folder / f"{rank:04d}.times"


@dataclass(frozen=True)
class RunDir:
    """The folder of one run; the only place that knows its file names."""

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
        """What happened, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def vocabulary(self) -> Path:
        """What the numbers of its text stand for, where a run reads text; the files that it names lie beside it."""
        return self.root / "vocabulary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, unless `checkpoint.to` names another place."""
        return self.root / "checkpoints"

    @property
    def jobs(self) -> Path:
        """The folder of what was given to a scheduler: the batch script and the log of each job."""
        return self.root / "jobs"

    @property
    def code(self) -> Path:
        """The folder of the copies of the code that jobs run."""
        return self.root / "code"

    @property
    def meetings(self) -> Path:
        """The folder in which ranks of several nodes find the address of rank 0."""
        return self.root / "meetings"

    def beat(self, rank: int) -> Path:
        """Return the file in which a rank says where it is right now."""
        return self.root / "ranks" / f"{rank:04d}.beat"

    @property
    def rank_times(self) -> Path:
        """How long each rank took for its own work, look after look."""
        return self.root / "ranks" / "times.jsonl"

    def hang_record(self, rank: int) -> Path:
        """Return the file in which a rank says where it is stuck, or how it ended."""
        return self.root / "hang" / f"{rank:04d}.json"

    def crash(self, rank: int) -> Path:
        """Return the file in which Python says where a rank was when native code ended it."""
        return self.root / "hang" / f"{rank:04d}.crash"

    @property
    def alarm(self) -> Path:
        """The file that a rank touches when it is stuck, so that the others say where they are."""
        return self.root / "hang" / "alarm"

    @property
    def hang_verdict(self) -> Path:
        """The file that says what the ranks found to hold the run up, while they still ran."""
        return self.root / "hang" / "verdict.json"

    @property
    def failure(self) -> Path:
        """The page that says how the last start of the run failed."""
        return self.root / "failure.md"

    @property
    def failure_facts(self) -> Path:
        """The same, as JSON."""
        return self.root / "failure.json"

    @property
    def environment(self) -> Path:
        """What the run was last started on: versions, machine, the variables that matter."""
        return self.root / "environment.json"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.root / "report.html"

    @property
    def scaling(self) -> Path:
        """What `paceline scale` has measured of it; its report and plots lie beside it."""
        return self.root / "scaling.json"

    @property
    def verdict(self) -> Path:
        """What `paceline profile` found."""
        return self.profile / VERDICT_FILE

    @property
    def csv(self) -> Path:
        """The folder of its tables, with log.to=csv."""
        return self.root / "csv"

    @property
    def tensorboard(self) -> Path:
        """The folder of its TensorBoard files, with log.to=tensorboard."""
        return self.root / "tensorboard"

    def bookmark(self, service: str) -> Path:
        """Return the file that says how far a service was told of this run."""
        return self.root / f"{service}.json"

    @property
    def profile(self) -> Path:
        """The folder of what `paceline profile` leaves."""
        return self.root / "profile"

    @property
    def started_over(self) -> Path:
        """The file that names the launch which has started this run over."""
        return self.root / "started-over"

    @property
    def lock(self) -> Path:
        """The file that the process which writes this run holds."""
        return self.root / "lock"


def profile_facts(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says what it measured, in the folder of a profile."""
    return folder / f"rank-{rank:04d}.json"


@contextlib.contextmanager
def writing_to(
    path: Path, elsewhere: str = "put the run elsewhere with runs=FOLDER"
) -> Iterator[None]:
    """Turn a failure to write into an error that names the folder and the way out."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot write {path}: {error.strerror or error}",
            fix=f"free some space or permit writing there, or {elsewhere}",
        ) from error


def make_private(folder: Path) -> Path:
    """Create a folder, and those above it, that only its owner can enter."""
    for part in [*reversed(folder.parents), folder]:
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(20, "a file is in the way", str(folder))
    return folder


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file under a temporary name, make it durable, then give it its name.

    What need not outlive a power cut does not wait for the disk.
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
    """Flush a folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
