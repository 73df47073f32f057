"""All runs of a folder, newest first, and what the files of each show: state, time, size, checkpoints."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.catalog import list_entries
from paceline.checkpoint.find import find_catalog
from paceline.cluster.registry import Submission, submissions
from paceline.cluster.slurm import cluster_name
from paceline.config.values import from_toml
from paceline.errors import PacelineError
from paceline.hang.script_processes import is_script_folder
from paceline.redact import without_logins
from paceline.report.find_run import NamedRun, is_run
from paceline.report.history import History, Metrics
from paceline.report.jobs import RunJob, jobs_or_unknown
from paceline.report.state import RunState, state_of
from paceline.rundir import RunDir
from paceline.safe_open import read_text

_LIVE = {"waiting", "starting", "training", "suspended", "unresponsive"}
_SHARED_WITH_WATCH = (
    *("name", "folder", "phase", "reason", "over", "world_size", "device", "restarts"),
    *("step", "total_steps", "loss", "metrics", "metrics_step"),
)


@dataclass(frozen=True)
class RunSummary:
    """What `paceline runs` shows of one run."""

    state: RunState
    folder: RunDir
    damage: str
    """What is wrong with its files; empty: nothing was found."""
    started_s: float
    """When it was last started or submitted."""
    trained_s: float
    size_bytes: int
    checkpoints: int | None
    """The intact checkpoints; None: they are at an address, which is not asked."""
    damaged_checkpoints: int
    checkpoints_at: str
    """Where the checkpoints are, if that is outside of the run's folder."""
    curve: tuple[Metrics, ...]
    """Step events, evenly spread over the run, if they were asked for."""

    @property
    def is_live(self) -> bool:
        """Whether it waits, trains, or may do so: Slurm does not say what became of its job."""
        return self.state.phase in _LIVE or (
            bool(self.state.live_jobs) and self.state.phase != "ended"
        )

    @property
    def status(self) -> str:
        """The state in one word, or two."""
        if self.damage:
            return "damaged"
        return "finished" if self.state.phase == "ended" else self.state.phase

    def facts(self) -> dict[str, Any]:
        """Return the keys of docs/json.md."""
        facts = self.state.facts()
        page = self.folder.report
        return {name: facts[name] for name in _SHARED_WITH_WATCH} | {
            "damage": self.damage,
            "started_s": self.started_s,
            "trained_s": self.trained_s,
            "size_bytes": self.size_bytes,
            "checkpoints": self.checkpoints,
            "damaged_checkpoints": self.damaged_checkpoints,
            "checkpoints_at": self.checkpoints_at,
            "report": str(page.absolute()) if is_page(page) else None,
        }


def run_folders(runs: Path) -> list[Path]:
    """Return the folders of all runs in a folder, the one that was started last first."""
    found: dict[Path, Path] = {}
    with contextlib.suppress(OSError):
        # A link to another run here would list it twice: folders come before links.
        for path in sorted(runs.iterdir(), key=lambda path: (path.is_symlink(), path.name)):
            if not path.name.startswith(".") and _is_run(path):
                found.setdefault(path.resolve(), path)
    return sorted(found.values(), key=lambda path: (-started_s(RunDir(path)), path.name))


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and is_run(path)
    except OSError:  # a folder of somebody else
        return False


def started_s(folder: RunDir) -> float:
    """Return when a run was last started or submitted: these files are replaced then, and not by a report."""
    starts = (folder.config, folder.environment, folder.launch_lock, folder.jobs)
    return max(_changed_s(starts), default=max(_changed_s([folder.events]), default=0.0))


def _changed_s(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.lstat().st_mtime


def summarize(folders: Sequence[Path], points: int = 0) -> list[RunSummary]:
    """Return what the files of runs show, with at most `points` points of their loss curves.

    Slurm is asked once for all, and only if jobs were submitted for them.
    """
    by_run: dict[Path, list[Submission]] = {path.resolve(): [] for path in folders}
    for submission in submissions(cluster_name()):
        if (run := Path(submission.run).resolve()) in by_run:
            by_run[run].append(submission)
    sent = [submission for jobs in by_run.values() for submission in jobs]
    asked, problem = jobs_or_unknown(sent)
    by_submission = dict(zip(sent, asked, strict=True))
    found = []
    for path in folders:
        named = NamedRun(RunDir(path), tuple(by_run[path.resolve()]))
        found.append(_summary(named, [by_submission[job] for job in named.jobs], problem, points))
    return found


def _summary(run: NamedRun, jobs: Sequence[RunJob], queue_problem: str, points: int) -> RunSummary:
    history = History(run.folder.events)
    history.read()
    state = state_of(run, history, jobs, queue_problem, losses=0)
    damage, settings = _settings(run.folder)
    checkpoints, damaged, where = _checkpoints(run.folder, str(settings.get("checkpoint.to", "")))
    is_started = history.started is not None and state.phase not in _LIVE
    return RunSummary(
        state=state,
        folder=run.folder,
        damage=_damage(run.folder, history) or (damage if is_started else ""),
        started_s=started_s(run.folder),
        trained_s=history.trained_s,
        size_bytes=size_of(run.folder.root),
        checkpoints=checkpoints,
        damaged_checkpoints=damaged,
        checkpoints_at=where,
        curve=tuple(history.spread(points)),
    )


def _settings(folder: RunDir) -> tuple[str, dict[str, Any]]:
    """Return what is wrong with config.toml, and its settings."""
    name = folder.config.name
    try:
        return "", from_toml(tomllib.loads(read_text(folder.config)))
    except FileNotFoundError:
        return ("" if is_script_folder(folder) else f"{name} is missing"), {}
    except OSError as error:
        return f"cannot read {name}: {error.strerror}", {}
    except (ValueError, RecursionError) as error:
        return f"{name} is not TOML: {error}", {}


def _damage(folder: RunDir, history: History) -> str:
    """Return what is wrong with the events: they cannot be read, or none of them is a start."""
    if history.problem or history.started or history.ending or not _has_text(folder.events):
        return history.problem
    return f"{folder.events.name} has no start of a run"


def _has_text(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_size > 0
    return False


def _checkpoints(folder: RunDir, to: str) -> tuple[int | None, int, str]:
    """Return intact and damaged checkpoints by names, sizes and manifests, and where they are, if elsewhere."""
    if "://" in to:
        return None, 0, without_logins(f"{to.rstrip('/')}/{folder.root.name}")
    try:
        catalog = find_catalog(str(folder.root))
        entries, _ = list_entries(catalog.storage)
    except (PacelineError, OSError):
        return 0, 0, ""
    intact = sum(entry.verdict == "ok" for entry in entries)
    return intact, len(entries) - intact, catalog.where if to else ""


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed."""
    total, folders = 0, [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def is_page(page: Path) -> bool:
    """Return whether the report page of a run exists, as a plain file."""
    return page.is_file() and not page.is_symlink()
