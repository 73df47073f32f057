"""Run a script untouched, then again under random SIGKILL, SIGTERM and SIGSTOP on changing numbers of ranks, and compare the bits."""

from __future__ import annotations

import argparse
import sys

from paceline.cli.verify import target, worlds_from
from paceline.errors import ConfigError
from paceline.verify.chaos import as_json, chaos, describe

HELP = "does it survive anything? kill it at random, on changing numbers of ranks, and compare the bits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument("script", help="a script, or the name of a recipe")
    parser.add_argument("--kills", type=int, default=50, help="how many times to kill or stop it")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the strikes")
    parser.add_argument(
        "--worlds",
        default="1,2,3,4",
        help="numbers of ranks to change among; the first runs untouched",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def main(known: argparse.Namespace) -> int:
    """Strike and compare; exit with 0 for the same bits, 1 for a difference."""
    if known.kills < 1:
        raise ConfigError(
            f"--kills {known.kills} proves nothing", fix="kill it at least once: --kills 1"
        )
    progress = None if known.json else sys.stderr
    verdict = chaos(
        target(known.script),
        tuple(known.arguments),
        worlds_from(known.worlds),
        known.kills,
        known.seed,
        progress,
    )
    print(as_json(verdict) if known.json else describe(verdict))
    return 0 if verdict.same else 1
