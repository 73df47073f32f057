"""The state of a run, from its files and Slurm's queue: no port, no server."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.slurm import FINAL_STATES
from paceline.errors import EnvironmentUnfit
from paceline.events import RunEnded, RunFailed
from paceline.hang.script_processes import is_script_folder, script_ending
from paceline.hang.verdict import HangVerdict, read_verdict
from paceline.report.find_run import NamedRun
from paceline.report.history import History, as_count, as_number
from paceline.report.job_logs import tail
from paceline.report.jobs import RunJob, jobs_of, unknown_jobs
from paceline.report.suspended import rank_pids, standstill
from paceline.rundir import RunDir
from paceline.runlock import is_held
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.stragglers import Straggler, find_straggler, read_beats
from paceline.world.job import time_left

Phase = Literal[
    "not started", "waiting", "starting", "training", "suspended", "unresponsive", "stopped", "failed", "lost", "ended",
]  # fmt: skip

_FAILED_STATES = FINAL_STATES - {"COMPLETED", "CANCELLED"}
_CAUSES = _FAILED_STATES - {"FAILED"}  # NODE_FAIL, OUT_OF_MEMORY, ...: why the ranks ended
_VERDICTS_WITHOUT_FAILURE = {"complete", "cancelled"}
_TRAINS = {"training", "unresponsive"}
_MAY_HANG = {"training", "failed", "lost"}  # a hang may have come before the failure
_LOSSES = 400
_LOG_LINES = 10
_FRESH_S = 60.0  # a process whose beat is younger than this is alive
_CLOCKS_DIFFER_S = 5.0
_QUIET_S = 3.0  # heartbeats come every 2 s
_LIVE = {"starting", "training", "suspended", "unresponsive"}
_SLURM_BACK_S = 60.0  # a Slurm that did not answer is asked again after this time
_BACK_WITHIN_S = 30.0  # a supervisor that restarts a failed run has done so by then


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint."""

    step: int
    age_s: float
    size_bytes: int
    path: str


@dataclass(frozen=True)
class RunState:
    """Everything that `paceline watch` shows of a run."""

    name: str
    folder: str
    phase: Phase
    reason: str
    """Why it stopped, failed or makes no progress."""
    jobs: tuple[RunJob, ...]
    queue_problem: str
    """Why Slurm does not answer."""
    world_size: int
    device: str
    restarts: int
    step: int
    total_steps: int
    loss: float
    losses: tuple[float, ...]
    metrics: dict[str, float]
    """Metrics of the newest evaluation."""
    metrics_step: int
    """Step of that evaluation; 0: there was none."""
    samples_per_s: float
    left_s: float
    """Seconds until the last step, at this speed."""
    checkpoint: Checkpoint | None
    slowest: Straggler | None
    hang: HangVerdict | None
    """The watchdog's verdict, while the run hangs."""
    ranks_seen: int
    """Ranks that have sent a beat since the start."""
    pids: tuple[int, ...]
    """The processes of ranks 0, 1, ... on this host; empty: they run elsewhere, or no longer."""
    log: str
    log_tail: tuple[str, ...]
    quiet_s: float
    """Seconds since the last event, beat or submission."""

    @property
    def live_jobs(self) -> list[RunJob]:
        """Jobs that wait or run."""
        return [job for job in self.jobs if job.live]

    @property
    def over(self) -> bool:
        """Whether the run has finished, or stopped and was not restarted."""
        if self.live_jobs:
            return False
        return self.phase == "ended" or (self.phase not in _LIVE and self.quiet_s > _BACK_WITHIN_S)

    def facts(self) -> dict[str, Any]:
        """Return the state with the keys of docs/json.md; NaN becomes null."""
        facts: dict[str, Any] = _without_nan(asdict(self))
        return facts | {"over": self.over}


class RunWatcher:
    """Reads the state of a run repeatedly: only new events, and the queue every few seconds."""

    def __init__(self, target: NamedRun, queue_every_s: float = 10.0) -> None:
        self._target = target
        self._history = History(target.folder.events)
        self._queue_every_s = queue_every_s
        self._asked_s = -math.inf
        self._jobs: tuple[RunJob, ...] = ()
        self._queue_problem = ""

    def look(self) -> RunState:
        """Return the current state."""
        self._ask_queue()  # first: it may take seconds, and the files go on
        self._history.read()
        return state_of(self._target, self._history, self._jobs, self._queue_problem)

    def _ask_queue(self) -> None:
        # The jobs of a finished run are about to leave the queue.
        finished = (self._history.ending or {}).get("event") == RunEnded.__name__
        every_s = 0 if finished else self._queue_every_s
        if self._queue_problem:
            every_s = _SLURM_BACK_S
        if not self._target.jobs or time.monotonic() - self._asked_s < every_s:
            return
        try:
            self._jobs, self._queue_problem = tuple(jobs_of(self._target.jobs)), ""
        except EnvironmentUnfit as error:
            self._jobs, self._queue_problem = tuple(unknown_jobs(self._target.jobs)), error.problem
        self._asked_s = time.monotonic()


def state_of(
    target: NamedRun,
    history: History,
    jobs: Sequence[RunJob],
    queue_problem: str = "",
    losses: int = _LOSSES,
) -> RunState:
    """Combine the files of a run with the state of its jobs; `losses`: the most points of the curve."""
    now_s, started, latest = time.time(), history.started or {}, history.latest
    started_s = as_number(started.get("time_s"), 0.0)
    ranks, lanes = as_count(started.get("world_size")), as_count(started.get("lanes"))
    beats = read_beats(target.folder.beat(0).parent, ranks, started_s)
    total, rate = as_count(started.get("total_steps")), latest.samples_per_s if latest else math.nan
    step = max([latest.step if latest else 0, as_count(started.get("from_step")), *_steps(beats)])
    left_samples = max(0, total - step) * as_count(started.get("global_batch"))
    phase = phase_of(history, jobs, alive=_alive(target.folder.lock, beats, now_s), now_s=now_s)
    reason = _reason(target.folder, history, phase, jobs)
    phase, reason = _phase_by_launcher(target.folder, phase, reason), reason or history.problem
    hang = read_verdict(target.folder) if phase in _MAY_HANG else None
    quiet_s = max(0.0, now_s - _last_active_s(target, history, beats))
    if phase in _LIVE and (found := standstill(target.folder, jobs, hang, quiet_s, _QUIET_S)):
        phase, reason = found
    log, (metrics_step, metrics) = _log_of(target, jobs), history.evaluation
    return RunState(
        name=target.name,
        folder=str(target.folder.root.absolute()),
        phase=phase,
        reason=reason,
        jobs=tuple(jobs),
        queue_problem=queue_problem,
        world_size=ranks,
        device=str(started.get("device", "")),
        restarts=max(0, history.starts - 1),
        step=min(step, total) if total else step,
        total_steps=total,
        loss=latest.loss if latest else math.nan,
        losses=tuple(history.losses(losses)),
        metrics=metrics,
        metrics_step=metrics_step,
        samples_per_s=rate,
        left_s=left_samples / rate if rate > 0 else math.nan,
        checkpoint=_checkpoint(history, now_s),
        ranks_seen=len(beats),
        pids=rank_pids(target.folder, ranks) if phase in _LIVE else (),
        slowest=find_straggler(beats, lanes, ranks) if phase in _TRAINS else None,
        hang=hang,
        log=log,
        log_tail=tuple(tail(Path(log), _LOG_LINES)) if log else (),
        quiet_s=quiet_s,
    )


def _steps(beats: Sequence[Beat]) -> list[int]:
    return [beat.step for beat in beats]


def _last_active_s(target: NamedRun, history: History, beats: Sequence[Beat]) -> float:
    times_s = [
        as_number((event or {}).get("time_s"), 0.0) for event in (history.started, history.ending)
    ]
    times_s += [beat.time_s for beat in beats]
    times_s += [job.time_s for job in target.jobs]
    return max(times_s)


def phase_of(history: History, jobs: Sequence[RunJob], *, alive: bool, now_s: float) -> Phase:
    """Return the phase of a run; the queue knows better than the events whether it runs."""
    ending = (history.ending or {}).get("event", "")
    waits = any(job.waits for job in jobs)
    if ending == RunEnded.__name__ and not waits:
        return "ended"
    if running := [job for job in jobs if job.runs]:
        has_started = history.started and not ending and _started_in(running[0], history, now_s)
        return "training" if has_started else "starting"
    if waits:
        return "waiting"
    if ending:
        return "failed" if ending == RunFailed.__name__ else "stopped"
    if alive:
        return "training" if history.started else "starting"
    return "lost" if history.started else _phase_before_start(jobs)


def _phase_before_start(jobs: Sequence[RunJob]) -> Phase:
    return "failed" if jobs and jobs[-1].state in _FAILED_STATES else "not started"


def _phase_by_launcher(folder: RunDir, phase: Phase, reason: str) -> Phase:
    """Return the phase of a run that is restarted, that never started, or of a script that writes no events."""
    if phase != "not started":
        is_back = phase == "failed" and is_held(folder.launch_lock)
        return "starting" if is_back else phase
    if not is_script_folder(folder):
        return "failed" if reason else "not started"
    return "training" if is_held(folder.launch_lock) else script_ending(folder)


def _started_in(job: RunJob, history: History, now_s: float) -> bool:
    """Return whether the last start belongs to the running job, not to one that was killed before."""
    used_s = time_left(job.used)  # Slurm writes all times in one format
    started_s = as_number((history.started or {}).get("time_s"), 0.0)
    return math.isinf(used_s) or started_s >= now_s - used_s - _CLOCKS_DIFFER_S


def _alive(lock: Path, beats: Sequence[Beat], now_s: float) -> bool:
    return is_held(lock) or any(now_s - beat.time_s < _FRESH_S for beat in beats)


def _reason(folder: RunDir, history: History, phase: Phase, jobs: Sequence[RunJob]) -> str:
    """Return why the run ended: by its events, or by its job if the training never started."""
    by_slurm = f"Slurm: job {jobs[-1].job} is {jobs[-1].state}" if jobs else ""
    if phase in {"stopped", "failed", "waiting", "starting"} and history.ending:
        # Rank -1: the other ranks only lost the connection, and Slurm may know why.
        is_symptom = phase == "failed" and history.ending.get("rank") == -1
        if is_symptom and jobs and jobs[-1].state in _CAUSES:
            return by_slurm
        return str(history.ending.get("reason", ""))
    if phase == "lost" and jobs and jobs[-1].state in FINAL_STATES:
        return by_slurm
    if phase in {"not started", "failed"} and not history.started:
        verdict = "".join(tail(folder.job_verdict, 1))
        return "" if verdict in _VERDICTS_WITHOUT_FAILURE else verdict.removeprefix("failed with ")
    return ""


def _checkpoint(history: History, now_s: float) -> Checkpoint | None:
    saved = history.checkpoint
    if saved is None:
        return None
    age_s = max(0.0, now_s - as_number(saved.get("time_s"), now_s))
    size_bytes = as_count(saved.get("size_bytes"))
    return Checkpoint(as_count(saved.get("step")), age_s, size_bytes, str(saved.get("path", "")))


def _log_of(target: NamedRun, jobs: Sequence[RunJob]) -> str:
    """Return the log of the running job, else the newest log that exists."""
    running = [job.log for job in jobs if job.runs]
    choices = [*running, *(submission.log for submission in reversed(target.jobs))]
    with contextlib.suppress(OSError):
        return next((log for log in choices if Path(log).is_file()), choices[-1] if choices else "")
    return ""


def _without_nan(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
