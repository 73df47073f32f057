"""Which mistakes of a batch script show only at the end of its job: at the time limit, or when a rank fails."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.doctor.batch_parser import Script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import Launch, tasks_of


def no_signal(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Name a job that is not warned before its time limit."""
    training = [one for one in launches if one.kind in {"agent", "python"}]
    if training and "signal" not in script.options:
        yield problem(
            "no-signal",
            "no signal comes before the time limit: what was done since the last checkpoint is lost",
            "#SBATCH --signal=USR1@120, and save when it comes (Paceline does, with Slurm's own end time, too)",
            script.options.get("time", ("", training[0].line))[1],
        )


def signal_not_heard(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Name a warning that does not reach the ranks."""
    value, line = script.options.get("signal", ("", 0))
    name = value.partition("@")[0].rpartition(":")[2].removeprefix("SIG")
    traps = [one for one in script.commands if one.words[0] == "trap"]
    heard = any(name in {word.removeprefix("SIG") for word in one.words[2:]} for one in traps)
    front = next((one for one in launches if not one.command.background), None)
    to_shell = "B" in value.partition(":")[0] and ":" in value
    if to_shell and not heard:
        yield problem(
            "signal-not-heard",
            f"{name} goes to the batch shell alone, which dies of it, and the job with it",
            f"leave out B: (srun passes it on to the ranks), or trap it: trap '...' {name}",
            line,
        )
    elif to_shell and front:
        yield problem(
            "signal-not-heard",
            f"the shell runs its trap for {name} only when this command is over, which is too late",
            "start it with & and then `wait`",
            front.line,
        )
    elif (
        name
        and not to_shell
        and launches
        and not any(one.through or one.kind == "paceline" for one in launches)
    ):
        yield problem(
            "signal-not-heard",
            f"{name} goes to what srun has started, and here nothing is",
            "put srun before the program",
            line,
        )


def ranks_left_behind(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Name tasks that would wait for one that failed."""
    for one in launches:
        many = one.through == "srun" and one.kind == "python" and tasks_of(script, one) > 1
        if (
            many
            and "kill-on-bad-exit" not in one.asked
            and "SLURM_KILL_BAD_EXIT" not in {var.name for var in script.variables}
        ):
            yield problem(
                "ranks-left-behind",
                "if one rank fails, the others go on waiting for it until the time limit",
                "srun --kill-on-bad-exit=1",
                one.line,
            )


def exit_code_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Name a script that ends well whatever its training does."""
    careful = any(
        one.words[0] == "set" and re.search(r"(^| )-\w*e|errexit", " ".join(one.words))
        for one in script.commands
    )
    launches = [one for one in launches if one.kind != "other"]
    if not launches or careful or re.search(r"\$\?|^#!.* -\w*e", script.text):
        return
    last = launches[-1].command
    after = [
        one
        for one in script.commands[script.commands.index(last) + 1 :]
        if one.words[0] not in {"done", "fi", "}", "esac"}
    ]
    if after and not last.background and not last.checked:
        yield problem(
            "exit-code-lost",
            f"what comes after it decides how the job ends: a training that failed shows as COMPLETED (line {after[0].line})",
            "set -e at the top, or keep the code: code=$?; ...; exit $code",
            last.line,
        )
