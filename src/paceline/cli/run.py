"""Start N supervised ranks of a script on this machine; a failure ends all, is shown, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline.cluster.allocation import allocation_from, launch_on
from paceline.config.intervals import seconds_from
from paceline.errors import STOPPED, ConfigError, EnvironmentUnfit
from paceline.launch.failure import Failure
from paceline.launch.oom import killed_for_memory
from paceline.launch.restart import DEFAULT_RESTARTS, Launch, Restarts, launch_with_restarts
from paceline.launch.spec import LaunchSpec, Program, script
from paceline.launch.supervisor import launch
from paceline.report.failure import page_from_launch, write_failure_page
from paceline.world.address import listen_at, refuse_loopback_name, split_address

HELP = "start N ranks of a script on this machine, supervised, and again after a failure"


class NodePlace(NamedTuple):
    """Which of several hosts this one is, and where they meet."""

    node: int = 0
    nodes: int = 1
    address: str = ""


HERE = NodePlace()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "script", help="the script; words after it are its own, and so is everything after --"
    )
    add_launch_arguments(parser)
    add_host_arguments(parser)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every verb that starts a training."""
    parser.add_argument(
        "-n",
        "--ranks",
        default="",
        help="number of ranks on this machine (default 1); 2:4 starts 4 and may go on with as few as 2; in a Slurm "
        "allocation: on each of its nodes (default: as many as GPUs or tasks were asked for)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        help=f"start again after so many failures without progress in between (default: {DEFAULT_RESTARTS} once a checkpoint is saved)",
    )
    parser.add_argument(
        "--stop-after",
        default="",
        metavar="TIME",
        help="save and leave in time with exit code 75: 30m, 2h, HH:MM:SS",
    )


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for several hosts without a scheduler."""
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="hosts on which this same command is typed, each with -n ranks",
    )
    parser.add_argument("--node", type=int, help="with --nodes: which host this is, from 0 on")
    parser.add_argument(
        "--rendezvous",
        default="",
        metavar="HOST:PORT",
        help="with --nodes: where the hosts meet, an address of node 0",
    )


def main(known: argparse.Namespace) -> int:
    """Start the script."""
    target = script(known.script)
    return start(target, known, place_from(known))


def start(
    target: Program,
    known: argparse.Namespace,
    place: NodePlace = HERE,
    screen: TextIO | None = sys.stdout,
) -> int:
    """Launch and, if a rank failed, say which and why; return the exit code. Ranks speak on the screen, if there is one."""
    allocation = allocation_from(os.environ) if place.nodes == 1 else None
    fewest, ranks = ranks_from(known.ranks or str(allocation.ranks_per_node if allocation else 1))
    if known.max_restarts is not None and known.max_restarts < 0:
        raise ConfigError(
            f"--max-restarts {known.max_restarts} is negative", fix="give 0 for no restart"
        )
    if fewest and place.nodes > 1:
        raise ConfigError(
            f"-n {known.ranks} may go on with fewer ranks, which several hosts cannot agree on",
            fix=f"give one number, the same on every host: -n {ranks}",
        )
    deadline_s = time.time() + seconds_from(known.stop_after) if known.stop_after else math.inf
    spec = LaunchSpec(
        target,
        ranks,
        tuple(known.arguments),
        {},
        deadline_s,
        place.node,
        place.nodes,
        place.address,
    )
    _see_that_it_is_free(spec)
    begin = launch if allocation is None or allocation.is_local else partial(launch_on, allocation)
    restarts = Restarts(_most_restarts(known, spec), fewest)
    failure = launch_with_restarts(spec, restarts, screen, _say, partial(_begin_and_tell, begin))
    if failure is None:
        return 0
    _say(failure.message)
    return failure.exit_code


def _begin_and_tell(begin: Launch, spec: LaunchSpec, **given: Any) -> Failure | None:
    """Run the ranks to their end; a failure leaves a page in the run's folder, and its last lines with the message."""
    killed = killed_for_memory()
    failure = begin(spec, **given)
    if (
        failure is None
        or failure.exit_code == STOPPED
        or not Path(failure.run or "/nowhere").is_dir()
    ):
        return failure
    if killed_for_memory() > killed:
        failure = replace(
            failure, how=f"{failure.how}: the machine, or its share of it, ran out of memory"
        )
    page = page_from_launch(failure, shlex.join(["paceline", *sys.argv[1:]]))
    write_failure_page(page)
    return replace(failure, message="\n".join([failure.message, "", *page.last_lines()]))


def place_from(known: argparse.Namespace) -> NodePlace:
    """Return which of the hosts this one is."""
    if known.rendezvous:
        split_address(known.rendezvous)
    if known.nodes > 1 and known.node is None:
        raise ConfigError(
            f"--nodes {known.nodes} without --node does not say which host this is",
            fix=f"give --node 0 on the host of --rendezvous, and --node 1 to {known.nodes - 1} on the others",
        )
    return NodePlace(known.node or 0, known.nodes, known.rendezvous)


def _see_that_it_is_free(spec: LaunchSpec) -> None:
    """Refuse a place to meet that cannot be had, before anything is started."""
    if spec.address and spec.node == 0:
        host, port = split_address(spec.address)
        refuse_loopback_name(host)
        try:
            listen_at(host, port).close()
        except EnvironmentUnfit as error:
            raise EnvironmentUnfit(
                error.problem,
                fix="give --rendezvous an address of this host, which is node 0, and a port that is free here",
            ) from error


def _most_restarts(known: argparse.Namespace, spec: LaunchSpec) -> int | None:
    """Return how often to start again: on several hosts only where asked for, for none knows of the others."""
    restarts: int | None = known.max_restarts
    return 0 if restarts is None and spec.nodes > 1 else restarts


def ranks_from(text: str) -> tuple[int, int]:
    """Return the fewest ranks to go on with (0: no fewer), and those to start.

    >>> ranks_from("4"), ranks_from("2:4")
    ((0, 4), (2, 4))
    """
    found = re.fullmatch(r"(?:(\d+):)?(-?\d+)", text)
    if not found or (found[1] and not 1 <= int(found[1]) <= int(found[2])):
        raise ConfigError(
            f"-n {text!r} is not a number of ranks",
            fix="give one, as in -n 4, or a range, as in -n 2:4",
        )
    return int(found[1] or 0), int(found[2])


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"\n{text}", file=sys.stderr, flush=True)
