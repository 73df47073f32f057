"""How a job gets to Slurm: its code copied, its script written, its number kept."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster import registry, slurm
from paceline.cluster.batch import BatchJob, batch_script
from paceline.cluster.code_copy import CodeCopy, plan_copy, with_joined_values
from paceline.cluster.profile import ClusterProfile
from paceline.config.parse import settings_from_file
from paceline.config.schema import RunConfig
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.launch.spec import Program
from paceline.rundir import RunDir, make_private, write_whole, writing_to

_PLACE = {"name", "runs"}
_LEFT_BY_EARLIER = ("over", "cancelled", "idle", "chain", "failed-nodes")


@dataclass(frozen=True)
class SubmitRequest:
    """What a person asks for."""

    target: Program
    arguments: tuple[str, ...]
    profile: ClusterProfile
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    """0: as many as GPUs, and one where there are none."""
    time: str
    jobs: int = 1
    """How many jobs make a chain."""


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready to be submitted; nothing has been written yet."""

    request: SubmitRequest
    run: RunDir
    job: BatchJob
    code: CodeCopy
    script: str

    @property
    def log(self) -> str:
        """The log as Slurm is told it: %j stands for the job's number."""
        return str(self.run.jobs).replace("%", "%%") + "/%j.log"


def prepare(request: SubmitRequest, folder: Path) -> PreparedJob:
    """Settle all that can be settled without Slurm."""
    run = RunDir(_run_folder(request, folder))
    code = plan_copy(request.target, request.arguments, run.code)
    job = BatchJob(
        words=code.words,
        run=run.root,
        folder=folder,
        python=sys.executable,
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node or request.gpus_per_node or 1,
        gpus_per_node=request.gpus_per_node,
        time=request.time,
        user=f"{os.getuid()}:{os.getgid()}",
    )
    if 0 < job.gpus_per_node < job.ranks_per_node:
        raise ConfigError(
            f"{job.ranks_per_node} ranks a node cannot have a GPU each of {job.gpus_per_node}",
            fix=f"leave --ranks-per-node out, or ask for --gpus-per-node {job.ranks_per_node}",
        )
    if request.jobs < 1:
        raise ConfigError(f"--jobs {request.jobs} submits nothing", fix="give at least 1")
    return PreparedJob(request, run, job, code, batch_script(job, request.profile))


def submit(prepared: PreparedJob) -> list[registry.Submission]:
    """Write the job's files and give it to Slurm: one job, or a chain of which each goes on where the one before stopped."""
    cluster = slurm.cluster_name()
    _refuse_a_second(prepared.run, cluster)
    _write(prepared)
    family, found = secrets.token_hex(4), list[registry.Submission]()
    try:
        for place in range(prepared.request.jobs):
            before = found[-1].job if found else ""
            found.append(_submit_one(prepared, family, place, before, cluster))
    except PacelineError:
        if found:
            slurm.cancel([one.job for one in found])
        raise
    write_whole(prepared.run.jobs / "chain", "".join(f"{one.job}\n" for one in found).encode())
    return found


def _refuse_a_second(run: RunDir, cluster: str) -> None:
    """Refuse to submit a run that has jobs in the queue: two of them would end each other."""
    mine = [one.job for one in registry.submissions(cluster) if Path(one.run) == run.root]
    live = [job.job for job in slurm.queued_jobs(*mine) if job.live] if mine else []
    if live:
        raise ConfigError(
            f"the run {run.root.name} has jobs in the queue already: {', '.join(live)}",
            fix=f"`paceline cancel {live[0]}` first, or give this one another name=",
        )


def _run_folder(request: SubmitRequest, folder: Path) -> Path:
    """Return the run's folder: as the script's words and settings files name it, else by the name of the script."""
    settings = _settings(with_joined_values(request.arguments))
    name = settings.get("name") or Path(request.target.name).stem
    runs = settings.get("runs") or RunConfig.runs
    RunConfig(name=name)  # which refuses what cannot be a folder
    return (folder / runs).resolve() / name


def _settings(words: Sequence[str]) -> dict[str, str]:
    """Return the name and the folder of the run, as far as the words name them; words win over files.

    >>> _settings(["epochs=3", "--name", "x", "runs=/y"]), _settings(["--name=a", "name=b"])
    ({'name': 'x', 'runs': '/y'}, {'name': 'b'})
    """
    from_files, found = dict[str, str](), dict[str, str]()
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        plain = option.removeprefix("--")
        if option == "--config":
            from_files |= {
                key: str(kept)
                for key, kept in settings_from_file(Path(value)).items()
                if key in _PLACE
            }
        elif plain in _PLACE and (equals or option != plain):
            found[plain] = value if equals else following
    return from_files | found


def _write(prepared: PreparedJob) -> None:
    jobs = prepared.run.jobs
    with writing_to(jobs):
        make_private(jobs)
        for name in _LEFT_BY_EARLIER:
            (jobs / name).unlink(missing_ok=True)
        write_whole(jobs / "job.sh", prepared.script.encode())
    prepared.code.make()


def _submit_one(
    prepared: PreparedJob, family: str, place: int, before: str, cluster: str
) -> registry.Submission:
    run, job = prepared.run, prepared.job
    words = [f"--job-name={run.root.name}", f"--output={prepared.log}", f"--chdir={job.folder}"]
    words += [f"--dependency=afterany:{before}"] if before else []
    said = slurm.run_command(
        "sbatch", "--parsable", *words, str(run.jobs / "job.sh"), family, str(place)
    )
    number = said.strip().partition(";")[0]
    if not re.fullmatch(r"\d+", number):
        raise EnvironmentUnfit(
            f"sbatch answered {said.strip()!r}, which is no job", fix="see `squeue --me`"
        )
    submission = registry.Submission(
        job=number,
        run=str(run.root),
        script=prepared.request.target.name,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        time=job.time,
        log=str(run.jobs / f"{number}.log"),
        time_s=time.time(),
        after=before,
        cluster=cluster,
    )
    registry.register(submission)
    return submission
