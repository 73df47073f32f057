"""`paceline run`: run a script on N supervised processes, on this machine or on several hosts."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline import terminal
from paceline.cluster.allocation import allocation_from, launch_on
from paceline.config.arguments import option, positional, verbatim
from paceline.config.intervals import seconds_from
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.launch.failure import Failure, out_of_memory
from paceline.launch.oom import killed_for_memory
from paceline.launch.restart import Launch, Restarts, launch_with_restarts
from paceline.launch.script_folder import script_folder
from paceline.launch.spec import LaunchSpec, Program, script
from paceline.launch.supervisor import FoundRun, launch
from paceline.redact import command_line
from paceline.report.failure import page_from_launch, was_refused, write_failure_page
from paceline.world.address import listen_at, refuse_loopback_name, split_address


class NodePlace(NamedTuple):
    """Index of this host, number of hosts, and the rendezvous address."""

    node: int = 0
    nodes: int = 1
    address: str = ""


ONE_HOST = NodePlace()


class Caller(NamedTuple):
    """Where a launch is typed, if not in a shell."""

    resume: str
    """What a person does to start it again."""
    import_from: str
    """The folder from which the script may import modules, besides its own."""
    found_run: FoundRun


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Arguments of every verb that starts a training."""

    ranks: str = option("", "-n", "--ranks", metavar="N")
    """Ranks on this machine (default: 1). 2:4 starts 4 ranks and continues with as few as 2 after a failure. In a Slurm allocation: ranks per node (default: one per GPU or task)."""
    max_restarts: int | None = None
    """Restart at most N times in a row without progress; 0: never (default: 3, once there is a checkpoint; with --nodes: 0)."""
    stop_after: str = option("", metavar="TIME")
    """Save and exit with code 75 after this time: 30m, 2h, HH:MM:SS. A script without Paceline gets SIGTERM then."""


@dataclass(frozen=True, kw_only=True)
class HostArguments:
    """Arguments for several hosts without a scheduler."""

    nodes: int = 1
    """Number of hosts. Type the same command on each, with its own --node."""
    node: int | None = option(None, metavar="I")
    """Index of this host, from 0; needed with --nodes."""
    rendezvous: str = option("", metavar="HOST:PORT")
    """Address of node 0 where the hosts connect; needed with --nodes."""


@dataclass(frozen=True, kw_only=True)
class RunArguments(HostArguments, LaunchArguments):
    """If a rank crashes, all ranks are stopped, the error is shown, and the run resumes from its newest intact checkpoint."""

    python: str = option("", metavar="PATH")
    """Python interpreter of the ranks, with its own packages; it needs no Paceline (default: this one)."""
    script: str = positional(metavar="SCRIPT")
    """Python script to run."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script, such as settings (key=value). Options of paceline come before SCRIPT; all words after it are passed on unchanged."""


def main(arguments: RunArguments) -> int:
    """Run the script; return the exit code."""
    program = script(arguments.script, arguments.python)
    place = place_from(arguments)
    with script_folder(program) as folder:
        return start(program, arguments, arguments.script_arguments, place, folder=folder)


def start(
    program: Program,
    arguments: LaunchArguments,
    script_arguments: Sequence[str],
    place: NodePlace = ONE_HOST,
    screen: TextIO | None = sys.stdout,
    folder: str = "",
    caller: Caller | None = None,
) -> int:
    """Launch the ranks, with their output on the screen; print a failure; return the exit code."""
    allocation = allocation_from(os.environ) if place.nodes == 1 else None
    default_ranks = allocation.ranks_per_node if allocation else 1
    fewest, ranks = ranks_from(arguments.ranks or str(default_ranks))
    _check_launch(arguments, fewest, ranks, place)
    deadline_s = math.inf
    if arguments.stop_after:
        deadline_s = time.time() + seconds_from(arguments.stop_after)
    spec = LaunchSpec(program, ranks, tuple(script_arguments), {}, deadline_s, *place)
    _check_rendezvous(spec)
    restarts = Restarts(_most_restarts(arguments, spec), fewest)
    spec = replace(spec, max_restarts=restarts.limit, folder=folder)
    begin: Launch = launch
    if caller is not None:
        spec = replace(spec, import_from=caller.import_from)
        begin = partial(launch, found_run=caller.found_run)
    if allocation is not None and not allocation.is_local:
        begin = partial(launch_on, allocation)
        _refuse_time_limit(arguments, program)
    typed = ["paceline", *sys.argv[1:]]
    again = typed if program.foreign else _without_start_over(typed)
    resume = caller.resume if caller else shlex.join(again)
    command = caller.resume if caller else command_line(typed)
    spec = replace(spec, command=command)
    run_ranks = partial(_run_ranks, begin, resume)
    failure = launch_with_restarts(spec, restarts, screen, _say, run_ranks)
    if failure is None:
        return 0
    if failure.message:
        _say(failure.message + failure.how_to_resume)
    return failure.exit_code


def _without_start_over(words: list[str]) -> list[str]:
    """Return a command without the words that would start the run over.

    >>> _without_start_over(["train.py", "--resume", "never", "resume=never", "name=a"])
    ['train.py', 'name=a']
    """
    pairs = zip(words, [*words[1:], ""], strict=True)
    flags = {place for place, pair in enumerate(pairs) if pair == ("--resume", "never")}
    dropped = flags | {place + 1 for place in flags}
    rest = [word for place, word in enumerate(words) if place not in dropped]
    return [word for word in rest if word not in {"resume=never", "--resume=never"}]


def _refuse_time_limit(arguments: LaunchArguments, program: Program) -> None:
    if arguments.stop_after and program.foreign:
        raise ConfigError(
            "--stop-after does not apply to a script without Paceline on several nodes",
            fix="leave it out; the time limit of the allocation ends the script",
        )


def _check_launch(arguments: LaunchArguments, fewest: int, ranks: int, place: NodePlace) -> None:
    if arguments.max_restarts is not None and arguments.max_restarts < 0:
        raise ConfigError(
            f"--max-restarts must be at least 0, got {arguments.max_restarts}",
            fix="give --max-restarts 0 for no restart",
        )
    if fewest and place.nodes > 1:
        raise ConfigError(
            f"-n {arguments.ranks} is a range, and --nodes needs a fixed number of ranks",
            fix=f"give the same number on every host: -n {ranks}",
        )


def _run_ranks(begin: Launch, resume: str, spec: LaunchSpec, **options: Any) -> Failure | None:
    """Run the ranks to their end; after a failure, write its report into the run folder."""
    killed_before, begun_s = killed_for_memory(), time.time()
    failure = begin(spec, **options)
    if failure is None or failure.on_request:
        return failure
    if killed_for_memory() > killed_before:
        failure = out_of_memory(failure)
    if not Path(failure.run or "/nowhere").is_dir() or was_refused(failure, begun_s):
        return failure
    page = page_from_launch(failure, resume, begun_s)
    write_failure_page(page)
    if not failure.how:
        failure = replace(failure, message=f"{failure.message}\n{page.verdict}")
    if failure.run == spec.folder:  # the script's own traceback stays the last thing on the screen
        message = f"logs and failure page: {failure.run}\n\n{failure.message}"
        return replace(failure, message=message)
    if page.hang and (failure.lost_peer or page.cause == "another way"):
        when = " after timeout.step_s" if failure.lost_peer else ""
        failure = replace(failure, message=_hang_message(page.hang, page.cause, when))
        page = replace(page, hang="")
    return replace(failure, how_to_resume="\n".join(["", "", *page.last_lines()]))


_HANG_FIXES = {
    "stopped": "check what suspended that process (Ctrl-Z, a debugger, a scheduler)",
    "silent": "check whether that process was swapped out or its host is gone",
    "gone": "check whether that process was killed, for its memory (dmesg) or by a scheduler",
    "link": "check the network between these hosts: paceline doctor",
    "reading": "check the storage of the data, and the code that reads it",
    "saving": "check the storage of the run folder",
    "another way": "let every rank call run.update equally often, and run.finish, break, return and continue in the same step",
}
"""What to do about a hang whose cause is no line of the script."""


def _hang_message(verdict: str, cause: str, when: str) -> str:
    """Return the message about a run that hung, with the verdict of its watchdog first."""
    fix = _HANG_FIXES.get(cause, "correct the line that is named")
    return (
        f"error: {verdict}; all ranks were stopped{when}\n"
        f"  fix: {fix}; `paceline hang` shows what every rank did"
    )


def place_from(arguments: HostArguments) -> NodePlace:
    """Return the place of this host among the hosts of --nodes."""
    if arguments.rendezvous:
        split_address(arguments.rendezvous)
    if arguments.nodes > 1 and arguments.node is None:
        raise ConfigError(
            f"--nodes {arguments.nodes} needs --node, the index of this host",
            fix="give --node 0 on the host of --rendezvous, "
            f"and --node 1 to {arguments.nodes - 1} on the others",
        )
    return NodePlace(arguments.node or 0, arguments.nodes, arguments.rendezvous)


def _check_rendezvous(spec: LaunchSpec) -> None:
    """Raise EnvironmentUnfit if node 0 cannot listen at the rendezvous address."""
    if not spec.address or spec.node != 0:
        return
    host, port = split_address(spec.address)
    refuse_loopback_name(host)
    try:
        listen_at(host, port).close()
    except EnvironmentUnfit as error:
        raise EnvironmentUnfit(
            error.problem,
            fix="give --rendezvous an address of this host (node 0) and a free port",
        ) from error


def _most_restarts(arguments: LaunchArguments, spec: LaunchSpec) -> int | None:
    """Return the limit; several hosts do not restart by default, because no host sees the others."""
    if arguments.max_restarts is None and spec.nodes > 1:
        return 0
    return arguments.max_restarts


def ranks_from(text: str) -> tuple[int, int]:
    """Return the fewest ranks to continue with (0: no fewer), and the ranks to start.

    >>> ranks_from("4"), ranks_from("2:4")
    ((0, 4), (2, 4))
    """
    match = re.fullmatch(r"(?:(\d+):)?(-?\d+)", text)
    if match and match[1] and not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(
            f"-n {text} is no range: it begins with the fewest ranks, at least 1",
            fix="give the fewest ranks first: -n 2:4",
        )
    if not match:
        raise ConfigError(
            f"-n {text!r} is not a number of ranks",
            fix="give a number (-n 4) or a range (-n 2:4)",
        )
    return int(match[1] or 0), int(match[2])


def _say(text: str) -> None:
    sys.stdout.flush()
    terminal.error(f"\n{text}")
