"""The Slurm allocation of this shell, if there is one, and how ranks start on all its nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TextIO

from paceline import handover
from paceline.cluster import slurm
from paceline.errors import ConfigError
from paceline.launch.failure import Failure, stopped
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec
from paceline.rundir import writing_to
from paceline.world.hostlist import expand_hostlist

_POLL_S = 0.2
_END_S = 5.0  # time for the last messages of srun
_STDERR = 2
_KEPT_BYTES = 1 << 16
_PERMANENT = {2, 3}  # exit codes of usage and environment errors: a restart would fail again
_RANKS_FROM = (
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
# srun would read these variables of an enclosing step or sbatch as options of our own step.
_OUTER_STEP = re.compile(
    r"SLURM_(NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_NODE|CPU_BIND|DISTRIBUTION|STEP_|STEPID)"
)


@dataclass(frozen=True)
class Allocation:
    """The nodes that Slurm has allocated to this shell."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    """The number of GPUs, else of tasks, that the job requested per node."""
    is_local: bool
    """Whether this host is the only node, so that srun is not needed."""
    cpus_per_node: int = 0

    def srun_command(self, ranks_per_node: int) -> list[str]:
        """Return the srun command line that starts ranks on every node, beside any other step.

        >>> allocation = Allocation(("n1", "n2"), 2, is_local=False, cpus_per_node=8)
        >>> allocation.srun_command(4)  # doctest: +NORMALIZE_WHITESPACE
        ['srun', '--nodes=2', '--ntasks=8', '--ntasks-per-node=4', '--kill-on-bad-exit=1',
         '--overlap']
        """
        count = len(self.nodes)
        command = [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count * ranks_per_node}",
            f"--ntasks-per-node={ranks_per_node}",
            "--kill-on-bad-exit=1",
            "--overlap",
        ]
        if 0 < self.cpus_per_node < ranks_per_node:
            command.append("--overcommit")
        return command


def allocation_from(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this shell, or None outside of any."""
    node_list = env.get("SLURM_JOB_NODELIST")
    if "SLURM_JOB_ID" not in env or not node_list or handover.MEETING in env:
        return None
    if _first_number(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ConfigError(
            f"srun started this command {env['SLURM_STEP_NUM_TASKS']} times, "
            "and each would start all ranks",
            fix="start it once, without srun: `paceline run SCRIPT`; "
            "or let srun start the ranks: `srun python SCRIPT`",
        )
    nodes = tuple(expand_hostlist(node_list))
    is_local = len(nodes) == 1 and env.get("SLURMD_NODENAME") == nodes[0]
    cpus = _first_number(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return Allocation(nodes, _ranks_per_node(env), is_local, cpus)


def _ranks_per_node(env: Mapping[str, str]) -> int:
    for name in _RANKS_FROM:
        if ranks := _first_number(env.get(name, "")):
            return ranks
    return 1


def _first_number(text: str) -> int:
    """Return the count at the start of a Slurm variable, after an optional GPU type.

    >>> _first_number("4(x2)"), _first_number("h100:2"), _first_number("")
    (4, 2, 0)
    """
    match = re.match(r"(?:[^:,]+:)*(\d+)", text)
    return int(match[1]) if match else 0


def launch_on(
    allocation: Allocation, spec: LaunchSpec, screen: TextIO | None, signals: StopSignals
) -> Failure | None:
    """Run the ranks on all nodes until they exit; return the failure, or None on success."""
    slurm.require("srun")
    if spec.target.interpreter:
        raise ConfigError(
            f"--python {spec.target.interpreter} starts ranks on this machine only, "
            f"and the allocation has {len(allocation.nodes)} nodes",
            fix="install paceline in that environment, and start its own `paceline run`",
        )
    with _shared_folder() as folder, signals:
        rank = [sys.executable, "-u", "-m", "paceline.launch.rank_srun"]
        process = subprocess.Popen(
            [
                *allocation.srun_command(spec.ranks),
                *rank,
                *spec.target.argv,
                *spec.arguments,
            ],
            env=_environment(spec, folder),
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.PIPE,
            # Ctrl-C must reach the launcher alone, which asks the ranks to save.
            start_new_session=True,
        )
        with process, _Errors(process.stderr) as errors:
            code = _wait(process, signals)
        return _outcome(code, folder, signals, errors.of_srun)


class _Errors:
    """Forwards what srun and the ranks write to stderr, and keeps the last of it: srun names the task that was killed."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._forward, name="srun", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(_END_S)

    def _forward(self) -> None:
        while data := os.read(self._stream.fileno(), _KEPT_BYTES):
            with contextlib.suppress(OSError):  # nobody reads: srun must not wait for that
                os.write(_STDERR, data)
            self._kept = (self._kept + data)[-_KEPT_BYTES:]

    @property
    def of_srun(self) -> str:
        """The messages of srun about tasks that ended."""
        lines = self._kept.decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.startswith("srun: error: "))


def _wait(process: subprocess.Popen[bytes], signals: StopSignals) -> int:
    """Wait for srun; the first signal asks the ranks to save and exit, the second kills them."""
    forwarded = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        if signals.count > forwarded:
            forwarded = signals.count
            process.send_signal(signal.SIGUSR1 if forwarded == 1 else signal.SIGQUIT)


def _outcome(code: int, folder: Path, signals: StopSignals, errors: str) -> Failure | None:
    progress = handover.read_progress(folder / "progress")
    if (folder / "stopped").exists():
        return stopped(progress, signals.first)
    if code == 0:
        return None
    if signals.first == signal.SIGINT:
        raise KeyboardInterrupt
    code = 128 - code if code < 0 else code
    message = f"the ranks failed with exit code {code}; see their error above"
    run = handover.read_run(handover.run_file(folder / "progress"))
    return Failure(-1, code, message, code in _PERMANENT, progress, details=errors, run=run)


def _environment(spec: LaunchSpec, folder: Path) -> dict[str, str]:
    env = step_environment(os.environ)
    files = {
        handover.STOP_MARK: str(folder / "stopped"),
        handover.PROGRESS: str(folder / "progress"),
    }
    return env | spec.variables(env) | files


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a new step: without the tasks of the step that started us.

    >>> step_environment({"HOME": "/me", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"})
    {'HOME': '/me', 'SLURM_CPUS_PER_TASK': '8', 'SRUN_CPUS_PER_TASK': '8'}
    """
    kept = {name: value for name, value in env.items() if not _OUTER_STEP.match(name)}
    if "SLURM_CPUS_PER_TASK" in kept:
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    return kept


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """Make a private folder that all nodes see: in the working directory, like the runs."""
    with writing_to(Path.cwd()):
        folder = Path(tempfile.mkdtemp(prefix=".paceline-", dir=Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
