"""Whether this shell is inside a Slurm allocation, and how ranks start on all of its nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paceline import handover
from paceline.cluster import slurm
from paceline.errors import ConfigError
from paceline.launch.failure import Failure, stopped
from paceline.launch.signals import StopSignals
from paceline.launch.spec import LaunchSpec
from paceline.rundir import writing_to
from paceline.world.hostlist import expand_hostlist

_LOOK_S = 0.2
_HOPELESS = {2, 3}  # exit codes of mistakes that would only come again
# What a shell inside a step, or sbatch, has been told of its own tasks would be taken for ours.
_NOT_OURS = re.compile(
    r"SLURM_(NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER_NODE|CPU_BIND|DISTRIBUTION|STEP_|STEPID)"
)


@dataclass(frozen=True)
class Allocation:
    """The nodes that Slurm has given to this shell."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    """As many as GPUs, or tasks, were asked for."""
    is_local: bool
    """Whether this is the only node, so that nothing has to start elsewhere."""
    cpus_per_node: int = 0

    def srun_command(self, ranks_per_node: int) -> list[str]:
        """Return the words that start ranks on every node, each at its place, whatever else runs in the allocation.

        >>> Allocation(("n1", "n2"), 2, is_local=False, cpus_per_node=8).srun_command(4)
        ['srun', '--nodes=2', '--ntasks=8', '--ntasks-per-node=4', '--kill-on-bad-exit=1', '--overlap']
        """
        count = len(self.nodes)
        words = [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count * ranks_per_node}",
            f"--ntasks-per-node={ranks_per_node}",
        ]
        words += ["--kill-on-bad-exit=1", "--overlap"]
        return [*words, "--overcommit"] if 0 < self.cpus_per_node < ranks_per_node else words


def allocation_from(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this shell, or None outside of any."""
    nodes = env.get("SLURM_JOB_NODELIST")
    if "SLURM_JOB_ID" not in env or not nodes or handover.MEETING in env:
        return None
    if _first_number(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ConfigError(
            f"srun has started this {env['SLURM_STEP_NUM_TASKS']} times, and each would start all ranks",
            fix="start it once, without srun: `paceline run SCRIPT`; or let srun start the ranks: `srun python SCRIPT`",
        )
    hosts = tuple(expand_hostlist(nodes))
    wanted = (
        "SLURM_GPUS_ON_NODE",
        "SLURM_GPUS_PER_NODE",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
    )
    ranks = next((number for name in wanted if (number := _first_number(env.get(name, "")))), 1)
    is_local = len(hosts) == 1 and env.get("SLURMD_NODENAME") == hosts[0]
    return Allocation(hosts, ranks, is_local, _first_number(env.get("SLURM_JOB_CPUS_PER_NODE", "")))


def _first_number(text: str) -> int:
    """Return the count that Slurm's words begin with, whatever type of GPU is named before it.

    >>> _first_number("4(x2)"), _first_number("h100:2"), _first_number("")
    (4, 2, 0)
    """
    found = re.match(r"(?:[^:,]+:)*(\d+)", text)
    return int(found[1]) if found else 0


def launch_on(
    allocation: Allocation, spec: LaunchSpec, screen: TextIO | None, signals: StopSignals
) -> Failure | None:
    """Run the ranks on all nodes to their end; return why they ended, if not because they were done."""
    slurm.require("srun")
    with _shared_folder() as folder, signals:
        words = allocation.srun_command(spec.ranks)
        process = subprocess.Popen(
            [
                *words,
                sys.executable,
                "-u",
                "-m",
                "paceline.launch.rank_srun",
                *spec.target.words,
                *spec.arguments,
            ],
            env=_environment(spec, folder),
            stdin=subprocess.DEVNULL,
            stdout=screen,
            start_new_session=True,  # so that Ctrl-C reaches the launcher alone, which asks the ranks to save
        )
        code = _wait(process, signals)
        return _outcome(code, folder, signals)


def _wait(process: subprocess.Popen[bytes], signals: StopSignals) -> int:
    """Wait for srun; the first signal asks the ranks to save and leave, the second ends them."""
    passed_on = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        if signals.count > passed_on:
            passed_on = signals.count
            process.send_signal(signal.SIGUSR1 if passed_on == 1 else signal.SIGQUIT)


def _outcome(code: int, folder: Path, signals: StopSignals) -> Failure | None:
    progress = handover.read_progress(folder / "progress")
    if (folder / "stopped").exists():
        return stopped(progress)
    if code == 0:
        return None
    if signals.first == signal.SIGINT:
        raise KeyboardInterrupt
    code = 128 - code if code < 0 else code
    return Failure(
        -1,
        code,
        f"the ranks failed with exit code {code}; why is said above",
        code in _HOPELESS,
        progress,
    )


def _environment(spec: LaunchSpec, folder: Path) -> dict[str, str]:
    env = step_environment(os.environ)
    return (
        env
        | spec.variables(env)
        | {handover.STOP_MARK: str(folder / "stopped"), handover.PROGRESS: str(folder / "progress")}
    )


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a step of our own is told of this shell's surroundings: the cores of a task, but not the tasks of others.

    >>> step_environment({"HOME": "/me", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"})
    {'HOME': '/me', 'SLURM_CPUS_PER_TASK': '8', 'SRUN_CPUS_PER_TASK': '8'}
    """
    kept = {name: value for name, value in env.items() if not _NOT_OURS.match(name)}
    if "SLURM_CPUS_PER_TASK" in kept:
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    return kept


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """Make a private folder that all nodes see: beside the runs, where the ranks will write, too."""
    with writing_to(Path.cwd()):
        folder = Path(tempfile.mkdtemp(prefix=".paceline-", dir=Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
