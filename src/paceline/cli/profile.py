"""Where the time goes: run some steps of a script (or a recipe) with torch's profiler on all ranks; one trace, and a verdict in words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.cli.verify import target
from paceline.errors import ConfigError
from paceline.measure.profile import TRACE_FILE, profile, write_verdict
from paceline.measure.profile_verdict import as_dict, describe
from paceline.measure.trace import read_traces
from paceline.rundir import TENSORBOARD

HELP = "where the time goes: some steps on all ranks, one trace for Perfetto, a verdict in words"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "script",
        help="a script, or the name of a recipe; words after it are its own. Or a folder that ranks of several nodes have "
        "filled, started in any way with profile.to=FOLDER: then it is only read",
    )
    parser.add_argument(
        "-n", "--ranks", type=int, default=1, help="number of ranks on this machine (default 1)"
    )
    parser.add_argument(
        "--skip", type=int, default=5, help="steps before, which warm up (default 5)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured (default 5)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def main(known: argparse.Namespace) -> int:
    """Profile, and say what was found."""
    if min(known.skip, known.steps) < 1:
        raise ConfigError(
            "a profile needs a step before it and one of its own",
            fix="give --skip and --steps 1 or more",
        )
    folder = Path(known.script)
    if folder.is_dir():
        verdict, home = write_verdict(folder.name, read_traces(folder), folder), folder
    else:
        window = known.skip, known.steps
        verdict, home = profile(target(known.script), known.ranks, window, known.arguments)
    if known.json:
        print(json.dumps(as_dict(verdict), indent=2))
        return 0
    print(describe(verdict))
    print(
        f"trace: {home / TRACE_FILE} (open it in ui.perfetto.dev or chrome://tracing); TensorBoard: {home / TENSORBOARD}"
    )
    return 0
