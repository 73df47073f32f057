"""The command line: one thin function per verb."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from paceline.cli import (
    bench,
    cancel,
    chaos,
    ckpt,
    cluster,
    data,
    doctor,
    hang,
    jobs,
    lesson,
    profile,
    report,
    run,
    sample,
    scale,
    submit,
    train,
    verify,
    watch,
)
from paceline.errors import PacelineError, did_you_mean
from paceline.version import VERSION

Verb = Callable[[argparse.Namespace], int]

_VERBS = {
    "train": train,
    "run": run,
    "submit": submit,
    "watch": watch,
    "hang": hang,
    "jobs": jobs,
    "cancel": cancel,
    "cluster": cluster,
    "verify": verify,
    "profile": profile,
    "chaos": chaos,
    "bench": bench,
    "scale": scale,
    "report": report,
    "doctor": doctor,
    "ckpt": ckpt,
    "data": data,
    "sample": sample,
    "lesson": lesson,
}

_EPILOG = "exit codes: 0 yes or fine; 1 the answer is no, or the training failed; 2 bad usage or config; 3 the environment is unfit; 75 saved and stopped, run it again to go on"


def main() -> None:
    """Run one verb and exit with its code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is not
            signal.signal(number, _leave)
    sys.exit(run_verb(sys.argv[1:]))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Leave by the door, so that temporary folders go, and the programs that were started."""
    sys.exit(128 + number)


def run_verb(words: Sequence[str]) -> int:
    """Run one verb; return its exit code."""
    try:
        return _dispatch(words)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python complains again when it flushes
        return 1
    except KeyboardInterrupt:
        print("interrupted; all ranks were ended", file=sys.stderr)
        return 130


def _dispatch(words: Sequence[str]) -> int:
    parser = build_parser()
    if words and not words[0].startswith("-") and words[0] not in _VERBS:
        parser.error(f"there is no verb {words[0]!r}\n  fix: {did_you_mean(words[0], _VERBS)}")
    if not words:
        parser.print_help()
        return 2
    ours, theirs = split_words(words)
    known, rest = parser.parse_known_args(ours)
    if not hasattr(known, "verb"):
        parser.error(
            f"there is no option {rest[0]!r}\n  fix: {did_you_mean(rest[0], ['--help', '--version'])}"
        )
    known.arguments = [*rest, *theirs]
    verb: Verb = known.verb
    return verb(known)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words up to the first `--`, and those after it, which belong to the script.

    >>> split_words(["run", "x.py", "--", "-n", "--", "3"])
    (['run', 'x.py'], ['-n', '--', '3'])
    """
    split = list(words).index("--") if "--" in words else len(words)
    return list(words[:split]), list(words[split + 1 :])


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="One training, any number of processes, the same bits.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"paceline {VERSION}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for name, module in _VERBS.items():
        own = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            epilog=_EPILOG,
            allow_abbrev=False,
            add_help=name != "train",
        )
        module.add_arguments(own)
        own.set_defaults(verb=module.main)
    return parser
