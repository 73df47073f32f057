"""Start N supervised ranks of a script on this machine; the first failure ends all, and is shown last."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from paceline.launch.local import launch
from paceline.launch.spec import LaunchSpec, script

HELP = "start N ranks of a script on this machine, supervised"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument("script", help="the script; words after it are its own, and so is everything after --")
    parser.add_argument("-n", "--ranks", type=int, default=1, help="number of ranks on this machine")


def main(known: argparse.Namespace) -> int:
    """Start the script."""
    return start(LaunchSpec(script(known.script), known.ranks, tuple(known.arguments)), sys.stdout)


def start(spec: LaunchSpec, screen: TextIO | None) -> int:
    """Launch and, if a rank failed, say which and why; return the exit code."""
    failure = launch(spec, screen)
    if failure is None:
        return 0
    sys.stdout.flush()
    print(f"\n{failure.message}", file=sys.stderr)
    return failure.exit_code
