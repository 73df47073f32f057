"""`paceline chaos`: kill a training at random and compare its bits with an undisturbed run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paceline.cli.verify import check_at_least, program_from, worlds_from
from paceline.config.arguments import option, positional, verbatim
from paceline.verify.chaos import as_json, chaos, describe


@dataclass(frozen=True, kw_only=True)
class ChaosArguments:
    """Sends SIGKILL, SIGTERM and SIGSTOP to random ranks, and restarts on changing numbers of ranks."""

    script: str = positional(metavar="SCRIPT")
    """Script to run, or the name of a recipe."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script, such as settings (key=value). Options of paceline come before SCRIPT."""
    kills: int = 50
    """Number of times to kill or stop it."""
    seed: int = 0
    """Random seed of the kills."""
    worlds: str = option("1,2,3,4", metavar="N,N")
    """World sizes to choose from; the undisturbed run uses the first."""
    json: bool = False
    """Print the result as JSON."""


def main(arguments: ChaosArguments) -> int:
    """Kill and compare; return 0 for identical bits, 1 for a difference."""
    check_at_least(1, "--kills", arguments.kills)
    result = chaos(
        program_from(arguments.script),
        arguments.script_arguments,
        worlds_from(arguments.worlds),
        arguments.kills,
        arguments.seed,
        None if arguments.json else sys.stderr,
    )
    print(as_json(result) if arguments.json else describe(result))
    return 0 if result.same else 1
