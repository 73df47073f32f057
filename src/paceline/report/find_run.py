"""Find a run by its name, its folder, or one of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.registry import Submission, base_id, submissions
from paceline.cluster.slurm import cluster_name
from paceline.errors import ConfigError, did_you_mean
from paceline.rundir import RunDir
from paceline.terminal import plain

_SUGGESTED = 10  # runs and jobs at most


@dataclass(frozen=True)
class NamedRun:
    """A run, and the jobs that were submitted for it, oldest first."""

    folder: RunDir
    jobs: tuple[Submission, ...]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.root.name


def find_run(name: str, runs: Path) -> NamedRun:
    """Return the run of a name, folder or job id; raise ConfigError with suggestions if there is none."""
    sent = submissions(cluster_name())
    if folder := _of_job(name, sent) or _of_path(name, runs) or _of_name(name, sent):
        return NamedRun(RunDir(folder), tuple(job for job in sent if _same(Path(job.run), folder)))
    raise _unknown(name, runs, sent)


def group_by_run(sent: Iterable[Submission]) -> list[NamedRun]:
    """Return the runs of submitted jobs, the one submitted last at the end."""
    jobs_by_run: dict[str, list[Submission]] = {}
    for job in sent:
        earlier = jobs_by_run.pop(job.run, [])
        jobs_by_run[job.run] = [*earlier, job]
    return [NamedRun(RunDir(Path(run)), tuple(jobs)) for run, jobs in jobs_by_run.items()]


def _of_job(name: str, sent: Sequence[Submission]) -> Path | None:
    """Return the run of a job; if two clusters have used the same id, the one submitted last."""
    return next((Path(job.run) for job in reversed(sent) if job.job in {name, base_id(name)}), None)


def _of_path(name: str, runs: Path) -> Path | None:
    inside = [runs / name] if name else []
    choices = [Path(name), *inside] if "/" in name else [*inside, Path(name)]
    return next((path for path in choices if is_run(path)), None)


def _of_name(name: str, sent: Sequence[Submission]) -> Path | None:
    folders = [run.folder.root for run in group_by_run(sent) if run.name == name]
    if len(folders) > 1:
        raise ConfigError(
            f"{len(folders)} runs are called {name}",
            fix=f"name its folder: {', '.join(plain(str(path)) for path in reversed(folders))}",
        )
    return folders[0] if folders else None


def is_run(path: Path) -> bool:
    """Return whether a folder belongs to a run, even one that has not started yet."""
    folder = RunDir(path)
    return any(
        part.exists() for part in (folder.config, folder.events, folder.jobs, folder.launches)
    )


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


def _unknown(name: str, runs: Path, sent: Sequence[Submission]) -> ConfigError:
    names = sorted(path.name for path in runs.iterdir() if is_run(path)) if runs.is_dir() else []
    newest = [name for job in reversed(sent) for name in (job.job, Path(job.run).name)]
    known = list(dict.fromkeys(map(plain, [*names[:_SUGGESTED], *newest[: 2 * _SUGGESTED]])))
    fix = (
        did_you_mean(name, known)
        if known
        else "give the folder of a run, or the folder of all runs with --runs"
    )
    return ConfigError(
        f"there is no run or job {name!r} (searched {runs} and the submitted jobs)",
        fix=fix,
    )
