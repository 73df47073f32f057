"""Mistakes in batch scripts that show at the end of a job: at the time limit, or when a rank fails."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.doctor.batch_parser import Script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import Launch, tasks_of


def no_signal(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a job without a warning signal before its time limit."""
    training = [launch for launch in launches if launch.kind in {"agent", "python"}]
    if training and "signal" not in script.options:
        yield problem(
            "no-signal",
            "no signal before the time limit: all steps since the last checkpoint are lost",
            "add #SBATCH --signal=USR1@120, and save a checkpoint when it arrives "
            "(Paceline does, and also reads the end time from Slurm)",
            script.options.get("time", ("", training[0].line))[1],
        )


def signal_not_heard(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a warning signal that does not reach the ranks."""
    value, line = script.options.get("signal", ("", 0))
    name = value.partition("@")[0].rpartition(":")[2].removeprefix("SIG")
    front = next((launch for launch in launches if not launch.command.background), None)
    to_shell = "B" in value.partition(":")[0] and ":" in value
    if to_shell and name not in _trapped(script):
        yield problem(
            "signal-not-heard",
            f"{name} goes only to the batch shell, which it kills, and the job with it",
            f"remove B: (srun passes the signal on to the ranks), or trap it: trap '...' {name}",
            line,
        )
    elif to_shell and front:
        yield problem(
            "signal-not-heard",
            f"the shell runs its trap for {name} only after this command ends, which is too late",
            "start it in the background with &, then `wait`",
            front.line,
        )
    elif name and not to_shell and launches and not any(map(_by_srun, launches)):
        yield problem(
            "signal-not-heard",
            f"{name} goes only to steps of srun, and this script starts none",
            "put srun before the program",
            line,
        )


def _trapped(script: Script) -> set[str]:
    names = set()
    for command in script.commands:
        if command.words[0] == "trap":
            names |= {word.removeprefix("SIG") for word in command.words[2:]}
    return names


def _by_srun(launch: Launch) -> bool:
    return bool(launch.through) or launch.kind == "paceline"


def ranks_left_behind(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find tasks that would wait for a failed one."""
    if script.last("SLURM_KILL_BAD_EXIT"):
        return
    for launch in launches:
        several = launch.kind == "python" and tasks_of(script, launch) > 1
        if launch.through == "srun" and several and "kill-on-bad-exit" not in launch.asked:
            yield problem(
                "ranks-left-behind",
                "if one rank fails, the others wait for it until the time limit",
                "use srun --kill-on-bad-exit=1",
                launch.line,
            )


def exit_code_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a script that exits with 0 even if its training fails."""
    launches = [launch for launch in launches if launch.kind != "other"]
    if not launches or _stops_at_errors(script) or re.search(r"\$\?|^#!.* -\w*e", script.text):
        return
    last = launches[-1].command
    rest = script.commands[script.commands.index(last) + 1 :]
    after = [command for command in rest if command.words[0] not in {"done", "fi", "}", "esac"}]
    if after and not last.background and not last.checked:
        yield problem(
            "exit-code-lost",
            f"the exit code of line {after[0].line} becomes that of the job: "
            "a failed training shows as COMPLETED",
            "put `set -e` at the top, or keep the exit code: code=$?; ...; exit $code",
            last.line,
        )


def _stops_at_errors(script: Script) -> bool:
    for command in script.commands:
        words = " ".join(command.words)
        if command.words[0] == "set" and re.search(r"(^| )-\w*e|errexit", words):
            return True
    return False
