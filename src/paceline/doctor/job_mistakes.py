"""Mistakes in batch scripts about the file, the resources, the environment, the time limit and the exit code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.doctor.batch_parser import Command, Script
from paceline.doctor.finding import Finding, problem
from paceline.doctor.launch_commands import (
    Launch,
    gpus_per_node,
    number,
    tasks_of,
    tasks_per_node,
)

_SHELLS = re.compile(r"#!\s*(/usr/bin/env\s+(-S\s+)?)?(\S*/)?(bash|sh|dash|ksh|zsh)(\s|$)")
_SYNTAX_S = 20.0
_SYNTAX = re.compile(r"line (\d+): (?!warning:)(?:syntax error:? ?)?(.*)")
_CONDA_HOOK = re.compile(
    r"conda(\.sh|\s+shell\.\w+\s+hook)|mamba(\.sh|\s+shell\s+hook)|"
    r"(module|ml)\b.*(conda|mamba|forge|python|torch)|^#!.*(-\w*l|-\w*i|--login)\b|^\s*(source|\.)\s+\S",
    re.MULTILINE | re.IGNORECASE,
)
_HANDLED = {"TERM", "INT", "HUP", "QUIT"}  # by torchrun, unless --signals-to-handle names others
_TO_HANDLE = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_UNSET = {
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS": "gpus",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
}


# ---- the file ----


def unreadable_file(text: str) -> Iterator[Finding]:
    """Find what sbatch or the shell refuses: DOS line ends, no interpreter, a syntax error."""
    if "\r\n" in text:
        yield problem(
            "dos-line-ends",
            "the lines end with CR LF: sbatch refuses the script",
            "convert it: sed -i 's/\\r$//' job.sh",
            1,
        )
    first = text.partition("\n")[0].strip()
    if text.strip() and not first.startswith("#!"):
        yield problem(
            "no-interpreter",
            "the first line does not begin with #!: sbatch refuses the script",
            "make #!/bin/bash the first line",
            1,
        )
    elif text.strip() and not _SHELLS.match(first):
        yield problem(
            "other-language",
            f"{first[2:].strip()} is not a shell: only the #SBATCH lines were read",
            "check the launch by hand, or start the program from a bash script",
            1,
        )
        return
    if "zsh" not in first and "ksh" not in first:
        yield from _syntax_error(text.replace("\r\n", "\n"))


def _syntax_error(text: str) -> Iterator[Finding]:
    """Ask bash whether it can read the script; -n reads commands and runs none."""
    bash = shutil.which("bash")
    if not bash:
        return
    command = [bash, "--norc", "--noprofile", "-O", "extglob", "-n"]
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=_SYNTAX_S,
            check=False,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    match = _SYNTAX.search(done.stderr.decode(errors="replace"))
    if done.returncode and match:
        yield problem(
            "syntax-error",
            f"bash cannot read the script: {match[2].strip()}; it runs the commands before this place "
            "and none after it",
            "close the quotes, brackets and blocks before this line; check with: bash -n job.sh",
            min(int(match[1]), len(text.splitlines())),
        )


def no_log_folder(script: Script, folders: Sequence[Path]) -> Iterator[Finding]:
    """Find a folder for logs that does not exist: Slurm does not make it, and the job fails without a log."""
    chdir = script.value("chdir")
    for name in ("output", "error"):
        value, line = script.options.get(name, ("", 0))
        parent = Path(value).parent
        if not value or re.search(r"[%$]", str(parent) + chdir):
            continue
        places = [folder / chdir / parent for folder in folders]
        if any(place.is_dir() for place in places):
            continue
        # An absolute path of which not even the folder above exists belongs to another machine.
        if (parent.is_absolute() or Path(chdir).is_absolute()) and not places[0].parent.is_dir():
            continue
        yield problem(
            "no-log-folder",
            f"--{name}={value}, but the folder {parent} does not exist: the job fails without a log",
            f"make it before sbatch: mkdir -p {parent}",
            line,
        )


def _late_options(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line in script.late_options:
        yield problem(
            "late-option",
            "#SBATCH after the first command: Slurm ignores it",
            "move it to the top of the script",
            line,
        )
    for command in script.commands:
        if command.words[0] == "SBATCH":
            yield problem(
                "late-option",
                "SBATCH without # is a command that does not exist: Slurm ignores it",
                "move it to the top of the script, and begin it with #SBATCH",
                command.line,
            )


def _open_text(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    for line, word in script.open_texts:
        yield problem(
            "open-text",
            f"no line {word} ends this here-document: the shell reads the rest of the script as its "
            "text, and runs none of it",
            f"put {word} at the start of a line of its own",
            line,
        )


# ---- resources ----


def _ranks_and_gpus(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find more or fewer ranks per node than GPUs."""
    gpus = gpus_per_node(script)
    if not gpus or script.is_set("CUDA_VISIBLE_DEVICES"):
        return
    for launch in launches:
        chosen = "CUDA_VISIBLE_DEVICES" in launch.command.variables or launch.command.background
        if chosen or any("gpu" in f"{name}={value}" for name, value in launch.asked.items()):
            continue
        option, ranks = "nproc-per-node", 0
        if launch.kind == "agent":
            ranks = _agent_ranks(script, launch)
        elif launch.kind == "python" and launch.through == "srun" and script.is_set("MASTER_ADDR"):
            option, ranks = "ntasks-per-node", tasks_per_node(script, launch)
        is_agent = launch.kind == "agent"
        if not ranks or ranks == gpus or (ranks < gpus and not is_agent):
            continue
        if ranks < gpus and "nodes" not in script.options and "gpus" in script.options:
            continue  # of all nodes together
        effect = f"{ranks - gpus} of these ranks find no GPU, or share one"
        if ranks < gpus:
            effect = f"{gpus - ranks} of these GPUs are idle"
        yield problem(
            "ranks-and-gpus",
            f"{ranks} ranks per node, but the job requests {gpus} GPUs per node: {effect}",
            f"use --{option}={gpus}, or request {ranks} GPUs: --gpus-per-node={ranks}",
            launch.line,
        )


def _agent_ranks(script: Script, launch: Launch) -> int:
    """Return the ranks per node that an agent starts; 0 if that is not known."""
    whole = number(script, launch.options.get("num-processes", "")) or 0
    if whole:
        nodes = number(script, launch.options.get("nnodes", "1")) or 0
        return whole // nodes if nodes and whole % nodes == 0 else 0
    return number(script, launch.options.get("nproc-per-node", "")) or 0


def _unset_variable(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find variables that Slurm sets only for an option that the script does not use."""
    asks_gpus = bool({"gpus", "gpus-per-task", "gpus-per-node"} & script.options.keys())
    asks_gpus |= script.value("gres").startswith("gpu")
    for launch in launches:
        names = re.findall(
            r"\b(SLURM_GPUS(?:_PER_NODE)?|SLURM_NTASKS_PER_NODE)\b(?!:?-)", launch.text
        )
        for name in dict.fromkeys(names):
            option = _UNSET[name]
            asks = asks_gpus if "GPUS" in name else "ntasks" in script.options
            if script.is_set(name) or option in launch.asked:
                continue
            instead = "$SLURM_GPUS_ON_NODE" if name == "SLURM_GPUS_PER_NODE" else "a number"
            if option not in script.options and asks:
                yield problem(
                    "unset-variable",
                    f"Slurm sets {name} only with --{option}, which this job does not use: it is empty",
                    f"use {instead}, or add #SBATCH --{option}",
                    launch.line,
                )
            elif ":" in script.value(option):
                yield problem(
                    "unset-variable",
                    f"{name} is {script.value(option)}, which is not a number",
                    f"use {instead}",
                    launch.line,
                )


def _cores_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find an srun that binds its tasks to one core each."""
    if script.is_set("SRUN_CPUS_PER_TASK") or "cpus-per-gpu" in script.options:
        return
    of_shell = script.last("SLURM_CPU_BIND")
    for launch in launches:
        given = {"cpus-per-task", "cpus-per-gpu", "tres-per-task"} & launch.asked.keys()
        if launch.through != "srun" or given or not launch.trains:
            continue
        asked = {name.replace("_", "-"): value for name, value in launch.asked.items()}
        bind = asked.get("cpu-bind", (of_shell.value or "") if of_shell else "")
        how = "--exact" if "exact" in asked else f"--cpu-bind={bind}" if "cores" in bind else ""
        if how and not any(name.startswith("$") for name in asked):
            yield problem(
                "cores-lost",
                f"srun {how} without -c binds each task to 1 core: since Slurm 22.05 srun does not "
                "inherit --cpus-per-task",
                'request cores with #SBATCH --cpus-per-task, and put `export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"` before srun',
                launch.line,
            )
            return


# ---- the environment of the tasks ----


def _environment_not_passed(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find --export=NONE, which also holds for every srun of the job."""
    value, line = script.options.get("export", ("", 0))
    is_undone = script.is_set("SLURM_EXPORT_ENV")
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


def _conda_without_hook(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find `conda activate` in a shell that does not know it: no file or module can have defined it."""
    for command in script.commands:
        if command.words[:2] == ("conda", "activate"):
            before = "\n".join(script.text.splitlines()[: command.line - 1])
            if not _CONDA_HOOK.search(before):
                yield problem(
                    "conda-without-hook",
                    "a batch shell has no `conda activate`: it fails, "
                    "and the script continues with another Python",
                    'put `eval "$(conda shell.bash hook)"` before it',
                    command.line,
                )
            return


# ---- the time limit ----


def _no_signal(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a training without a warning signal before its time limit."""
    training = [launch for launch in launches if launch.trains and launch.kind != "paceline"]
    if not training or "signal" in script.options:
        return
    first = training[0]
    fix = "add #SBATCH --signal=USR1@120, and save a checkpoint when it arrives (Paceline does, and also reads the end time from Slurm)"
    if not first.through:
        fix = f"put srun before the program, {fix}"
    if first.kind in {"agent", "deepspeed"}:
        # Seen on Slurm 22.05 with torch 2.13: USR1 ends the agent with code 138; the ranks are killed unsaved.
        fix = "use `paceline submit`"
        if "config-file" not in first.options and first.kind == "agent":
            fix += (
                f"; or #SBATCH --signal=USR1@120 with srun torchrun {_TO_HANDLE},SIGUSR1 --shutdown-timeout=100 (without "
                "the first option the signal kills the agent, and nothing is saved; without the second the ranks have 30 s)"
            )
    yield problem(
        "no-signal",
        "no signal before the time limit: all steps since the last checkpoint are lost",
        fix,
        script.options.get("time", ("", first.line))[1],
    )


def _signal_not_heard(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find a warning signal that does not reach the ranks."""
    value, line = script.options.get("signal", ("", 0))
    name = value.partition("@")[0].rpartition(":")[2].removeprefix("SIG")
    front = next((launch for launch in launches if not launch.command.background), None)
    to_shell = "B" in value.partition(":")[0] and ":" in value
    trapped = _trapped(script)
    sources = any(command.words[0] in {"source", "."} for command in script.commands)
    if to_shell and name not in trapped and not (sources and trapped):
        yield problem(
            "signal-not-heard",
            f"{name} goes only to the batch shell, which it kills, and the job with it",
            f"remove B: (srun passes the signal on to the ranks), or trap it: trap '...' {name}",
            line,
        )
    elif to_shell and front and launches[-1].command.at == front.command.at:
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
    elif name and not to_shell:
        yield from _signal_ends_agent(name, launches)


def _signal_ends_agent(name: str, launches: list[Launch]) -> Iterator[Finding]:
    for launch in launches:
        own = launch.options.get("signals-to-handle", "")
        handled = {one.strip().removeprefix("SIG") for one in own.split(",")} if own else _HANDLED
        traps = launch.wrapper or (launch.inner and "trap" in launch.inner.text)
        if launch.kind != "agent" or launch.through != "srun" or traps or name in handled:
            continue
        if any(option.startswith("$") for option in launch.options):
            continue
        yield problem(
            "signal-not-heard",
            f"{name} kills the torchrun agent, and with it the ranks: nothing is saved",
            f"use `paceline submit`, or torchrun {_TO_HANDLE},SIG{name}, and --shutdown-timeout=100 if the ranks "
            "need more than 30 s to save",
            launch.line,
        )


def _trapped(script: Script) -> set[str]:
    names = set()
    for command in script.commands:
        if command.words[0] == "trap":
            names |= {word.removeprefix("SIG") for word in command.words[2:]}
    return names


def _by_srun(launch: Launch) -> bool:
    return bool(launch.through) or launch.kind == "paceline"


# ---- the end ----


def _ranks_left_behind(script: Script, launches: list[Launch]) -> Iterator[Finding]:
    """Find tasks that would wait for a failed one."""
    if script.is_set("SLURM_KILL_BAD_EXIT"):
        return
    for launch in launches:
        together = launch.trains or script.is_exported("MASTER_ADDR")
        several = launch.kind == "python" and together and tasks_of(script, launch) > 1
        ends = {"kill-on-bad-exit", "wait"} & launch.asked.keys() or not launch.is_complete
        if launch.through == "srun" and several and not ends:
            yield problem(
                "ranks-left-behind",
                "if one rank fails, srun leaves the others running: they wait for it, "
                "until their own timeout or the time limit",
                "use srun --kill-on-bad-exit=1",
                launch.line,
            )


def _exit_code_lost(script: Script, launches: list[Launch]) -> Iterator[Finding]:  # noqa: PLR0911 - one return per way to keep it
    """Find a script that exits with 0 even if its training fails."""
    launches = [launch for launch in launches if launch.trains]
    if not launches or re.search(r"\$\?|PIPESTATUS|^#!.* -\w*e|\btrap\b.*\bERR\b", script.text):
        return
    last = launches[-1].command
    if last.piped and not last.checked and not _is_set(script, "pipefail"):
        yield problem(
            "exit-code-lost",
            "the exit code of the last command of the pipe becomes that of this line: "
            "a failed training shows as COMPLETED",
            "put `set -o pipefail` at the top",
            last.line,
        )
        return
    if last.function:  # what counts is where the function is called
        calls = [one for one in script.commands if one.words[0] == last.function]
        if not calls:
            return
        last = calls[-1]
    after = _commands_after(script, last)
    if last.background:
        waits = [command for command in after if command.words[0] == "wait"]
        if not waits or (_is_set(script, "e") and len(waits[-1].words) > 1):
            return
        last = waits[-1]
        if last.words == ("wait",) and not _commands_after(script, last):
            yield problem(
                "exit-code-lost",
                "`wait` alone returns 0, whatever the training returned: a failed training shows as COMPLETED",
                "name the process: pid=$! after the command, then wait $pid",
                last.line,
            )
            return
        after = _commands_after(script, last)
    if not after or last.checked or _is_set(script, "e"):
        return
    if after[0].words[0] == "exit" and after[0].words[1:] != ("0",):
        return
    yield problem(
        "exit-code-lost",
        f"the exit code of line {after[-1].line} becomes that of the job: "
        "a failed training shows as COMPLETED",
        "put `set -e` at the top, or keep the exit code: code=$?; ...; exit $code",
        last.line,
    )


def _commands_after(script: Script, last: Command) -> list[Command]:
    """Return the commands that run after another: not those of functions, nor of other branches."""
    here = dict(last.branches)
    after = []
    for command in script.commands:
        elsewhere = any(here.get(block, branch) != branch for block, branch in command.branches)
        if command.at > last.at and not command.function and not elsewhere:
            after.append(command)
    return after


def _is_set(script: Script, option: str) -> bool:
    """Return whether the shell has an option such as -e or pipefail.

    >>> from paceline.doctor.batch_parser import read_script
    >>> script = read_script("set -euo pipefail")
    >>> _is_set(script, "e"), _is_set(script, "pipefail"), _is_set(script, "x")
    (True, True, False)
    """
    long = {"e": "errexit"}.get(option, option)
    for command in script.commands:
        if command.words[0] == "set":
            short = any(re.fullmatch(rf"-\w*{option}\w*", word) for word in command.words[1:])
            if long in command.words or (short and len(option) == 1):
                return True
    return False


JOB_RULES = (
    _late_options, _open_text, _ranks_and_gpus, _unset_variable, _cores_lost, _environment_not_passed, _conda_without_hook,
    _no_signal, _signal_not_heard, _ranks_left_behind, _exit_code_lost,
)  # fmt: skip
