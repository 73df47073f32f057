"""Which run a person means: by its name, its folder, or one of its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.registry import Submission, submissions
from paceline.cluster.slurm import cluster_name
from paceline.errors import ConfigError, did_you_mean
from paceline.report.jobs import base_id
from paceline.rundir import RunDir
from paceline.terminal import plain

_NAMED = 10  # runs and jobs, at most, in the fix of an error


@dataclass(frozen=True)
class NamedRun:
    """A run, and the jobs that were submitted for it, the oldest first."""

    folder: RunDir
    jobs: tuple[Submission, ...]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.root.name


def find_run(word: str, runs: Path) -> NamedRun:
    """Return the run that is meant; one that is not there is an error which names those that are."""
    sent = submissions(cluster_name())
    if folder := _of_job(word, sent) or _of_path(word, runs) or _of_name(word, sent):
        return NamedRun(RunDir(folder), tuple(job for job in sent if _same(Path(job.run), folder)))
    raise _not_known(word, runs, sent)


def group_by_run(sent: Iterable[Submission]) -> list[NamedRun]:
    """Return each run for which jobs were submitted, the one that was submitted last at the end."""
    found: dict[str, list[Submission]] = {}
    for job in sent:
        earlier = found.pop(job.run, [])
        found[job.run] = [*earlier, job]
    return [NamedRun(RunDir(Path(run)), tuple(jobs)) for run, jobs in found.items()]


def _of_job(word: str, sent: Sequence[Submission]) -> Path | None:
    """Return the run of a job; where two clusters gave out the same id, of the job that was submitted last."""
    return next((Path(job.run) for job in reversed(sent) if job.job in {word, base_id(word)}), None)


def _of_path(word: str, runs: Path) -> Path | None:
    named = [runs / word] if word else []
    choices = [*named, Path(word)] if "/" not in word else [Path(word), *named]
    return next((path for path in choices if is_run(path)), None)


def _of_name(word: str, sent: Sequence[Submission]) -> Path | None:
    found = [target.folder.root for target in group_by_run(sent) if target.name == word]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} runs are called {word}",
            fix=f"name its folder: {', '.join(plain(str(path)) for path in reversed(found))}",
        )
    return found[0] if found else None


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run, or of one that has yet to start."""
    folder = RunDir(path)
    return any(part.exists() for part in (folder.config, folder.events, folder.jobs))


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _not_known(word: str, runs: Path, sent: Sequence[Submission]) -> ConfigError:
    here = sorted(path.name for path in runs.iterdir() if is_run(path)) if runs.is_dir() else []
    newest = [name for job in reversed(sent) for name in (job.job, Path(job.run).name)]
    known = list(dict.fromkeys(map(plain, [*here[:_NAMED], *newest[: 2 * _NAMED]])))
    fix = (
        did_you_mean(word, known)
        if known
        else "name a run by its folder, or say with --runs where runs are"
    )
    return ConfigError(
        f"there is no run and no job {word!r} (looked in {runs} and among the jobs submitted)",
        fix=fix,
    )
