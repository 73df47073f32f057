"""The commands of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

import support.slurm_cluster
from support.slurm_cluster import daemons, jobs, lifecycle, network
from support.slurm_cluster.attend import attend
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD, Settings, flag


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


_UNLOCKED = ("run", "submit", "status", "hold")


def _run(place: Place, args: argparse.Namespace) -> int:
    """Run a command that needs no lock."""
    if args.verb == "status":
        return lifecycle.show_status(place)
    if args.verb == "hold":
        lifecycle.hold(place, _settings(args))
        return 0
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.verb == "submit":
        return jobs.submit(place, words, args.timeout)
    return attend(place, args.node, words or ["bash"], args.user)


def _change(place: Place, args: argparse.Namespace) -> int:
    """Run a command that needs the lock."""
    with place.locked():
        if args.verb == "start":
            print(lifecycle.start(place, _settings(args)))
        elif args.verb == "stop":
            lifecycle.stop(place)
        elif args.verb == "power-off":
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
    parser.add_argument("--dir", default=os.environ.get("CLUSTER_DIR", "/tmp/slurm-cluster"))
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("start", "hold"):
        _add_settings(verbs.add_parser(verb))
    for verb in ("stop", "status"):
        verbs.add_parser(verb)
    _add_commands(verbs.add_parser("run"), verbs.add_parser("submit"))
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


def _add_commands(run: argparse.ArgumentParser, submit: argparse.ArgumentParser) -> None:
    run.add_argument("--node", default=HEAD)
    run.add_argument("--user")
    submit.add_argument("--timeout", type=float, default=600)
    for parser in (run, submit):
        parser.add_argument("command", nargs=argparse.REMAINDER)


def _add_changes(*parsers: argparse.ArgumentParser) -> None:
    *_, slurmd, link = parsers
    for parser in parsers:
        parser.add_argument("node")
    slurmd.add_argument("what", choices=["kill", "stop", "start"])
    link.add_argument("what", choices=["down", "up", "rate", "clear"])
    link.add_argument("value", nargs="?")
