"""Mistakes in batch scripts about their file, and about what the tasks of a job find in their environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.batch_parser import MARKED, Script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import Launch

_PER_TASK = re.compile(rf"{MARKED}\$[{{(]?(RANDOM|hostname|HOSTNAME|SLURMD_NODENAME)\b")
_RENDEZVOUS = re.compile(
    r"(--rdzv[-_](?:id|endpoint)|--master[-_]addr|MASTER_ADDR|MASTER_PORT)[= ]\S*"
)
_CONDA_HOOK = re.compile(
    r"conda(\.sh|\s+shell\.\w+\s+hook)|micromamba shell hook|(source|\.)\s+\S*(bashrc|bash_profile|/activate)|"
    r"module\s+load\s+\S*(conda|mamba)|^#!.*(-l|--login)\b",
    re.MULTILINE,
)
_ADDRESS_OF_SRUN = re.compile(r"^\s*(?:export\s+)?(\w+)=\"?[$`]\(?\s*srun\b.*2>&1", re.MULTILINE)


def unreadable_file(script: Script) -> Iterator[Finding]:
    """Find what sbatch refuses: DOS line ends, and no interpreter."""
    if "\r\n" in script.text:
        yield problem(
            "dos-line-ends",
            "the lines end with CR LF: sbatch refuses the script",
            "convert it: sed -i 's/\\r$//' job.sh",
            1,
        )
    if script.text.strip() and not script.text.startswith("#!"):
        yield problem(
            "no-interpreter",
            "the first line does not begin with #!: sbatch refuses the script",
            "make #!/bin/bash the first line",
            1,
        )


def no_log_folder(script: Script, folder: Path) -> Iterator[Finding]:
    """Find a folder for logs that does not exist: Slurm does not make it, and the job fails without a log."""
    base = folder / script.value("chdir")
    for name in ("output", "error"):
        value, line = script.options.get(name, ("", 0))
        parent = Path(value).parent
        if value and not re.search(r"[%$]", str(parent)) and not (base / parent).is_dir():
            yield problem(
                "no-log-folder",
                f"--{name}={value}, but the folder {parent} does not exist: the job fails without a log",
                f"make it before sbatch: mkdir -p {parent}",
                line,
            )


def different_in_each_task(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find an address or a rendezvous ID that every task computes for itself."""
    for launch in launches:
        for place in _RENDEZVOUS.finditer(launch.text):
            if launch.through and (found := _PER_TASK.search(place[0])):
                yield problem(
                    "different-in-each-task",
                    f"each task expands {found[1]} in {place[1]} for itself: "
                    "they get different values, and the rendezvous fails",
                    "compute it once in the batch shell, and export it",
                    launch.line,
                )


def environment_not_passed(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find --export=NONE, which also holds for every srun of the job."""
    value, line = script.options.get("export", ("", 0))
    is_undone = script.last("SLURM_EXPORT_ENV") or "unset SLURM_EXPORT_ENV" in script.body
    for launch in launches:
        own = launch.asked.get("export", "")
        if launch.through != "srun" or is_undone or (own or value).upper() != "NONE":
            continue
        yield problem(
            "environment-not-passed",
            "--export=NONE: srun starts the tasks without the variables of the batch shell, "
            "such as PATH and MASTER_ADDR",
            "put `export SLURM_EXPORT_ENV=ALL` before srun, or use srun --export=ALL",
            launch.line if own else line,
        )
        return


def conda_without_hook(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find `conda activate` in a shell that does not know it."""
    for command in script.commands:
        if command.words[:2] == ("conda", "activate") and not _CONDA_HOOK.search(script.text):
            yield problem(
                "conda-without-hook",
                "a batch shell has no `conda activate`: it fails, "
                "and the script continues with another Python",
                'put `eval "$(conda shell.bash hook)"` before it',
                command.line,
            )
            return


def unsafe_address(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find addresses that are read from commands which print more, or something else."""
    for variable in script.variables:
        if re.search(r"\bhostname\s+(--ip-address|-i)\b", variable.value):
            yield problem(
                "wrong-address",
                "`hostname --ip-address` may print 127.0.1.1, or several addresses",
                "use the name of the first node: "
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                variable.line,
            )
    for match in _ADDRESS_OF_SRUN.finditer(script.text):
        yield problem(
            "wrong-address",
            f"2>&1 adds the warnings of srun to {match[1]}",
            "remove 2>&1",
            script.text.count("\n", 0, match.start(1)) + 1,
        )
