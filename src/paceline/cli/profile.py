"""`paceline profile`: profile some steps on all ranks with torch's profiler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.verify import check_at_least, program_from
from paceline.config.arguments import option, positional, verbatim
from paceline.errors import ConfigError
from paceline.measure.profile import TRACE_FILE, profile, write_verdict
from paceline.measure.profile_verdict import as_dict, describe
from paceline.measure.trace import read_traces
from paceline.rundir import TENSORBOARD


@dataclass(frozen=True, kw_only=True)
class ProfileArguments:
    """Writes one trace of all ranks for Perfetto and TensorBoard, and says where the time goes."""

    script: str = positional(metavar="SCRIPT")
    """Script to run, or the name of a recipe. A folder is only read: ranks started in another way write their traces there with profile.to=FOLDER."""
    script_arguments: tuple[str, ...] = verbatim("ARGUMENT")
    """Arguments of the script, such as settings (key=value). Options of paceline come before SCRIPT."""
    ranks: int = option(1, "-n", "--ranks")
    """Ranks on this machine."""
    skip: int = 5
    """Warm-up steps before the profile starts."""
    steps: int = 5
    """Steps to profile."""
    json: bool = False
    """Print the result as JSON."""


def main(arguments: ProfileArguments) -> int:
    """Profile the steps and print the verdict."""
    check_at_least(1, "--skip", arguments.skip)
    check_at_least(1, "--steps", arguments.steps)
    folder = Path(arguments.script)
    if folder.is_dir():
        _refuse_arguments(arguments)
        verdict = write_verdict(folder.name, read_traces(folder), folder)
    else:
        program, window = program_from(arguments.script), (arguments.skip, arguments.steps)
        verdict, folder = profile(
            program, arguments.ranks, window, list(arguments.script_arguments)
        )
    if arguments.json:
        print(json.dumps(as_dict(verdict), indent=2))
        return 0
    print(describe(verdict))
    trace = f"{folder / TRACE_FILE} (open it in ui.perfetto.dev or chrome://tracing)"
    print(f"trace: {trace}; TensorBoard: {folder / TENSORBOARD}")
    return 0


def _refuse_arguments(arguments: ProfileArguments) -> None:
    if arguments.script_arguments:
        first = arguments.script_arguments[0]
        raise ConfigError(
            f"{arguments.script} is a folder, and takes no argument {first!r}",
            fix=f"give options before it: paceline profile --json {arguments.script}",
        )
