"""How a training becomes a Slurm job: copy its code, write its script, submit it, register it."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster import registry, slurm
from paceline.cluster.batch import BatchJob, batch_script
from paceline.cluster.code_copy import CodeCopy, plan_copy
from paceline.cluster.profile import ClusterProfile
from paceline.config.parse import settings_in_words
from paceline.config.schema import RunConfig
from paceline.errors import ConfigError, EnvironmentUnfit, PacelineError
from paceline.launch.spec import ANOTHER_PYTHON, Program
from paceline.main_script import name_of, script_at
from paceline.rundir import RunDir, make_private, write_whole, writing_to

_STALE_MARKS = ("over", "cancelled", "idle", "chain", "failed-nodes")


@dataclass(frozen=True)
class SubmitRequest:
    """A training to submit, and the resources for it."""

    target: Program
    arguments: tuple[str, ...]
    profile: ClusterProfile
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    """0: one per GPU, or one on a node without GPUs."""
    time: str
    jobs: int = 1
    """Length of the job chain."""


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready for submission; nothing has been written yet."""

    request: SubmitRequest
    run: RunDir
    job: BatchJob
    code: CodeCopy
    script: str

    @property
    def log(self) -> str:
        """The log path for sbatch: %j stands for the job ID."""
        return str(self.run.jobs).replace("%", "%%") + "/%j.log"


def prepare(request: SubmitRequest, folder: Path) -> PreparedJob:
    """Check the request and write its batch script in memory, without asking Slurm."""
    run = RunDir(_run_folder(request, folder))
    code = plan_copy(request.target, request.arguments, run.code)
    job = BatchJob(
        words=_rank_words(request, code),
        run=run.root,
        folder=folder,
        python=sys.executable,
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node or request.gpus_per_node or 1,
        gpus_per_node=request.gpus_per_node,
        time=request.time,
        user=f"{os.getuid()}:{os.getgid()}",
        foreign=request.target.foreign,
        script=_told(request.target, code),
    )
    if 0 < job.gpus_per_node < job.ranks_per_node:
        raise ConfigError(
            f"{job.ranks_per_node} ranks per node need as many GPUs, got {job.gpus_per_node}",
            fix=f"remove --ranks-per-node, or request --gpus-per-node {job.ranks_per_node}",
        )
    if request.jobs < 1:
        raise ConfigError(
            f"--jobs must be at least 1, got {request.jobs}", fix="use --jobs 1 or more"
        )
    _check_error_folder(request.profile, folder)
    return PreparedJob(request, run, job, code, batch_script(job, request.profile))


def _told(target: Program, code: CodeCopy) -> str:
    """Return by what a run knows that the copy is the same script as before."""
    kind, what = target.argv
    return script_at(Path(what)).told_of(code.words[1]) if kind == "path" else ""


def _rank_words(request: SubmitRequest, code: CodeCopy) -> tuple[str, ...]:
    """Return what `rank_srun` gets: the script, or another interpreter and the script."""
    interpreter = request.target.interpreter
    if not interpreter:
        return code.words
    if request.profile.container.kind != "none":
        raise ConfigError(
            f"--python {interpreter} does not apply to ranks in a container "
            f"({request.profile.container.kind})",
            fix="install the packages into the image, and remove --python",
        )
    return (ANOTHER_PYTHON, interpreter, *code.words[1:])


def _check_error_folder(profile: ClusterProfile, folder: Path) -> None:
    """Raise ConfigError if Slurm could not open the file for errors: such a job fails without a message."""
    for option in profile.options:
        match = re.fullmatch(r"(?:--error=|-e)(.+)", option)
        place = (folder / match[1]).parent if match else folder
        if "%" not in str(place) and not place.is_dir():
            raise ConfigError(
                f"the cluster profile has {option}, but the folder {place} does not exist",
                fix=f"create it (`mkdir -p {place}`), or remove the option: "
                "without it errors are in the job's log",
            )


def submit(prepared: PreparedJob) -> list[registry.Submission]:
    """Write the job's files and submit it: one job, or a chain in which each resumes the last."""
    cluster = slurm.cluster_name()
    _refuse_second_submission(prepared.run, cluster)
    _write(prepared)
    family = secrets.token_hex(4)
    chain: list[registry.Submission] = []
    try:
        for position in range(prepared.request.jobs):
            before = chain[-1].job if chain else ""
            chain.append(_submit_one(prepared, family, position, before, cluster))
    except PacelineError:
        if chain:
            slurm.cancel([submission.job for submission in chain], prepared.run.root.name)
        raise
    jobs = "".join(f"{submission.job}\n" for submission in chain)
    write_whole(prepared.run.jobs / "chain", jobs.encode())
    return chain


def _refuse_second_submission(run: RunDir, cluster: str) -> None:
    """Raise an error for a run with jobs in the queue: two jobs would take the run from each other."""
    known = registry.submissions(cluster)
    jobs = [submission for submission in known if Path(submission.run) == run.root]
    asked = registry.ask_queue(jobs)
    live = [job.submission.job for job in asked if job.queued and job.queued.live]
    if live:
        raise ConfigError(
            f"run {run.root.name} already has jobs in the queue: {', '.join(live)}",
            fix=f"run `paceline cancel {live[0]}` first, or give this run another name=",
        )


def _run_folder(request: SubmitRequest, folder: Path) -> Path:
    """Return the run's folder: from arguments and config files, else named after the script."""
    settings = settings_in_words(request.arguments, {"name", "runs"})
    name = settings.get("name") or _default_name(request.target)
    runs = settings.get("runs") or RunConfig.runs
    RunConfig(name=name)  # raises if the name cannot be a folder
    return (folder / runs).resolve() / name


def _default_name(target: Program) -> str:
    kind, what = target.argv
    return name_of(Path(what)) if kind == "path" else target.name


def _write(prepared: PreparedJob) -> None:
    jobs = prepared.run.jobs
    with writing_to(jobs):
        prepared.run.refuse_links()
        make_private(jobs)
        for name in _STALE_MARKS:
            (jobs / name).unlink(missing_ok=True)
        write_whole(jobs / "job.sh", prepared.script.encode())
    prepared.code.make()


def _submit_one(
    prepared: PreparedJob, family: str, position: int, before: str, cluster: str
) -> registry.Submission:
    run, job = prepared.run, prepared.job
    options = [f"--job-name={run.root.name}", f"--output={prepared.log}", f"--chdir={job.folder}"]
    if before:
        options.append(f"--dependency=afterany:{before}")
    script = [str(run.jobs / "job.sh"), family, str(position)]
    output = slurm.run_command("sbatch", "--parsable", *options, *script).strip()
    job_id = output.partition(";")[0]
    if not re.fullmatch(r"\d+", job_id):
        raise EnvironmentUnfit(
            f"sbatch printed {output!r} instead of a job ID", fix="check `squeue --me`"
        )
    submission = registry.Submission(
        job=job_id,
        run=str(run.root),
        script=prepared.request.target.name,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        time=job.time,
        log=str(run.jobs / f"{job_id}.log"),
        time_s=time.time(),
        after=before,
        cluster=cluster,
        user=os.getuid(),
    )
    registry.register(submission)
    return submission
