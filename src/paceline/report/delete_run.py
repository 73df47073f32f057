"""Delete the folder of a run: no link, inside the folder of all runs, with the files of a run, and not in use."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.config.values import from_toml
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError, did_you_mean
from paceline.events import Event
from paceline.report.history import LONGEST_LINE, parse_event
from paceline.report.runs import RunSummary, run_folders
from paceline.rundir import RunDir
from paceline.runlock import claimed, is_held
from paceline.safe_open import open_plain, read_text, reading
from paceline.terminal import plain

_EVENTS = {kind.__name__ for kind in Event.__subclasses__()}


def folders_to_delete(names: Sequence[str], runs: Path) -> list[Path]:
    """Return the folders of runs by their names; raise ConfigError for a name that is not a run of this folder."""
    folders = {_inside(name, runs): None for name in names}
    for folder in folders:
        _refuse_other_folder(folder, runs)
    return list(folders)


def _inside(name: str, runs: Path) -> Path:
    """Return the entry of the folder of all runs that a name or a path means."""
    above, slash, last = name.rstrip("/").rpartition("/")
    if last in {"", ".", ".."} or "\0" in name:
        raise ConfigError(f"{name!r} is not the name of a run", fix=_one_of(last, runs))
    if slash and Path(above or "/").resolve() != runs.resolve():
        raise ConfigError(
            f"{plain(name)} is not in {runs}, the folder of all runs",
            fix=f"name that folder: paceline rm {plain(last)} --runs {plain(above or '/')}",
        )
    return runs / last


def _refuse_other_folder(folder: Path, runs: Path) -> None:
    try:
        mode = folder.lstat().st_mode
    except OSError as error:
        problem = f"there is no run {folder.name!r} in {runs}"
        raise ConfigError(problem, fix=_one_of(folder.name, runs)) from error
    if stat.S_ISLNK(mode):
        raise ConfigError(
            f"{plain(str(folder))} is a symbolic link to {plain(str(folder.readlink()))}; links are not followed",
            fix="name the run that it leads to in its own folder (--runs FOLDER), or remove the link yourself",
        )
    if not stat.S_ISDIR(mode) or not has_files_of_a_run(RunDir(folder)):
        raise ConfigError(
            f"{plain(str(folder))} is not the folder of a run: it has no events, launches, job or settings of one",
            fix="check the name; delete other folders yourself",
        )


def _one_of(name: str, runs: Path) -> str:
    known = [plain(folder.name) for folder in run_folders(runs)]
    return did_you_mean(name, known) if known else "name the folder of all runs: --runs FOLDER"


def has_files_of_a_run(folder: RunDir) -> bool:
    """Return whether a folder holds what only a run leaves; a config.toml alone may be that of any program."""
    with contextlib.suppress(OSError):
        os.close(open_plain(folder.jobs / "job.sh"))
        return not folder.jobs.is_symlink()
    if _first_event(folder.events) in _EVENTS or _first_event(folder.launches) == "launched":
        return True
    try:
        settings = from_toml(tomllib.loads(read_text(folder.config)))
    except (OSError, ValueError, RecursionError):
        return False
    return settings.get("name") == folder.root.name and "batch.lanes" in settings


def _first_event(path: Path) -> str:
    """Return the name of the event in the first line of a file; empty: that line holds no event."""
    with contextlib.suppress(OSError), reading(path) as file:
        return str((parse_event(file.readline(LONGEST_LINE)) or {}).get("event", ""))
    return ""


def refuse_live(run: RunSummary) -> None:
    """Raise PacelineError for a run that a process writes, or that has a job."""
    folder, name = run.folder, plain(run.state.name)
    if run.state.live_jobs:
        jobs = ", ".join(job.job for job in run.state.live_jobs)
        if run.state.queue_problem:
            raise PacelineError(
                f"{name} has jobs ({jobs}), and Slurm does not say whether they still wait or run",
                fix="delete it on a host where `squeue` answers",
            )
        raise PacelineError(
            f"{name} has jobs in the queue: {jobs}", fix=f"`paceline cancel {name}` first"
        )
    if run.is_live or is_held(folder.lock) or is_held(folder.launch_lock):
        raise PacelineError(
            f"{name} is still running ({run.status})",
            fix="wait until it ends, or press Ctrl-C where it was started: it saves before it exits",
        )


def delete(run: RunSummary) -> None:
    """Rename the folder of a run, so that no half of it is ever seen, then remove its files; links are not followed."""
    folder = run.folder.root
    doomed = folder.with_name(f".deleted-{folder.name[:100]}.{secrets.token_hex(4)}")
    try:
        with _locked(run.folder):
            folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        left = doomed if doomed.exists() else folder
        raise EnvironmentUnfit(
            f"cannot delete {plain(str(left))}: {error.strerror or error}",
            fix=f"allow writing there, then remove it: rm -r {plain(str(left))}",
        ) from error


@contextlib.contextmanager
def _locked(folder: RunDir) -> Iterator[None]:
    """Hold the locks of a run, so that none starts in its folder while that is renamed."""
    with contextlib.ExitStack() as stack:
        for lock in (folder.lock, folder.launch_lock):
            if lock.is_file() and not lock.is_symlink():
                stack.enter_context(claimed(lock, patience_s=0))
        yield
