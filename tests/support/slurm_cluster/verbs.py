"""The commands of the command line. A user's command runs inside a host, with its signals and exit status passed on."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path

import support.slurm_cluster
from support.slurm_cluster import daemons, lifecycle, linux, network
from support.slurm_cluster.commands import pid_of
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD, Settings, flag

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run a command of the command line; return the exit status."""
    args = _parser().parse_args()
    place = Place(Path(args.dir).absolute())
    try:
        if os.geteuid():
            raise ClusterError("needs root")  # noqa: TRY301
        return _run(place, args) if args.verb in _UNLOCKED else _change(place, args)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


_UNLOCKED = ("run", "hold")


def _run(place: Place, args: argparse.Namespace) -> int:
    """Run a command that needs no lock."""
    if args.verb == "hold":
        lifecycle.hold(place, _settings(args))
        return 0
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    return attend(place, args.node, words or ["bash"])


def _change(place: Place, args: argparse.Namespace) -> int:
    """Run a command that needs the lock."""
    with place.locked():
        if args.verb == "power-off":
            lifecycle.power_off(place, args.node)
        elif args.verb == "power-on":
            lifecycle.power_on(place, args.node)
        elif args.verb == "slurmd":
            daemons.slurmd(place, args.node, args.what)
        else:
            network.link(place, args.node, args.what, args.value)
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    return Settings.of({option.name: getattr(args, option.name) for option in fields(Settings)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster",
        description=support.slurm_cluster.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", required=True)
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_settings(verbs.add_parser("hold"))
    run = verbs.add_parser("run")
    run.add_argument("--node", default=HEAD)
    run.add_argument("command", nargs=argparse.REMAINDER)
    _add_changes(*(verbs.add_parser(verb) for verb in ("power-off", "power-on", "slurmd", "link")))
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for option in fields(Settings):
        words = {"dest": option.name, "default": option.default, "help": option.metadata["help"]}
        if isinstance(option.default, bool):
            words["action"] = "store_false" if option.default else "store_true"
        elif isinstance(option.default, tuple):
            words |= {"action": "append", "default": []}
        else:
            words["type"] = type(option.default)
        parser.add_argument(flag(option), **words)


def _add_changes(*parsers: argparse.ArgumentParser) -> None:
    *_, slurmd, link = parsers
    for parser in parsers:
        parser.add_argument("node")
    slurmd.add_argument("what", choices=["kill", "start"])
    link.add_argument("what", choices=["down", "up", "rate", "clear"])
    link.add_argument("value", nargs="?")


def attend(place: Place, host: str, words: list[str]) -> int:
    """Run a command inside a host and return its exit status."""
    folder, env = Path.cwd(), outside_of_jobs()
    linux.enter_namespaces(pid_of(place, host))
    child = os.fork()  # only children are in the host's namespace of process ids
    if child == 0:
        _become(words, folder, env)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def outside_of_jobs() -> dict[str, str]:
    """Return the environment without the variables of an enclosing Slurm job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def _become(words: list[str], folder: Path, env: dict[str, str]) -> None:
    try:
        os.chdir("/")
        with contextlib.suppress(OSError):  # the host may not have it
            os.chdir(folder)
        linux.die_with_parent()
        os.execvpe(words[0], words, env)
    except OSError as error:  # no such command
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)
