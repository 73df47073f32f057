"""Look whether this machine, or these nodes, can train; read a batch script for mistakes; see what a start costs, and pack the environment.

Without words it looks at this machine; inside a Slurm allocation at all its nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.allocation import Allocation, allocation_from
from paceline.doctor import multi_host
from paceline.doctor.finding import Finding, all_ok, as_dict, format_findings
from paceline.doctor.mistakes import find_mistakes
from paceline.doctor.single_host import examine_host
from paceline.doctor.software import query_torch
from paceline.errors import ConfigError, did_you_mean
from paceline.terminal import plain
from paceline.world.address import own_addresses, split_address
from paceline.world.hostlist import expand_hostlist

HELP = "can this machine, these nodes, train? each check: ok, or the problem and its fix; also reads batch scripts"

_PORT = 29400
_MOST_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    add = parser.add_argument
    add(
        "script",
        nargs="?",
        metavar="JOB.sh",
        help="a batch script to read for mistakes; with --startup: a script",
    )
    _add_host_arguments(parser)
    add(
        "-n",
        "--ranks",
        type=int,
        default=0,
        help="of each host (default: as many as GPUs or tasks were asked for)",
    )
    add(
        "--runs",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where runs will be (default: %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="leave out torch, whose import may take minutes on a cold file system",
    )
    add(
        "--startup",
        action="store_true",
        help="what a start costs: of the script to its first step, or of torch",
    )
    add(
        "--pack",
        type=Path,
        metavar="DIR",
        help="pack the Python environment into one file, to be unpacked once a node",
    )
    add(
        "--env",
        type=Path,
        metavar="VENV",
        help="with --pack: the environment (default: the one that runs this)",
    )
    add("--json", action="store_true", help="print what is found as JSON")


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--nodes",
        default="",
        metavar="HOSTS",
        help="hosts to look at together, as a,b or n[1-4]: in a Slurm allocation some of its nodes (default: all); "
        "elsewhere the same is typed on every host",
    )
    meeting = f"without Slurm: where the hosts meet (default: the first one, port {_PORT})"
    add("--rendezvous", default="", metavar="HOST:PORT", help=meeting)
    add(
        "--node",
        type=int,
        metavar="I",
        help="without Slurm: which of --nodes this one is, if its name does not tell",
    )
    add(
        "--wait",
        type=float,
        default=300.0,
        metavar="S",
        help="how long to wait for others (default: %(default)g s)",
    )


def main(known: argparse.Namespace) -> int:
    """Look, and exit with 0 if all is well, 1 if there is a problem."""
    _refuse_strange_words(known)
    if known.pack is not None:
        from paceline.cli.doctor_startup import pack

        return pack(known)
    if known.startup:
        from paceline.cli.doctor_startup import startup

        return startup(known)
    if known.script is not None:
        return _read_script(Path(known.script), as_json=known.json)
    if known.ranks < 0 or known.wait <= 0:
        raise ConfigError(
            "-n and --wait must be more than nothing",
            fix="leave them out, or give them as in -n 4 --wait 60",
        )
    return _look(known)


def _refuse_strange_words(known: argparse.Namespace) -> None:
    options = [
        "--nodes",
        "--node",
        "--rendezvous",
        "--ranks",
        "--runs",
        "--wait",
        "--quick",
        "--startup",
        "--pack",
        "--env",
        "--json",
    ]
    if known.arguments and not known.startup:
        word = known.arguments[0]
        raise ConfigError(
            f"unexpected {word!r}",
            fix=did_you_mean(word, options) if word.startswith("-") else "name one script, or none",
        )
    ways = [
        name
        for name, used in {
            "--pack": known.pack is not None,
            "--startup": known.startup,
            "--nodes": bool(known.nodes),
        }.items()
        if used
    ]
    if len(ways) > 1 or (known.script is not None and "--startup" not in ways and ways):
        raise ConfigError(
            f"{' and '.join(ways)} do not go together{' with a script' if known.script else ''}",
            fix="do one thing at a time",
        )
    if known.env is not None and known.pack is None:
        raise ConfigError(
            "--env names what is to be packed, and nothing is", fix="say where to: --pack DIR"
        )


def _read_script(path: Path, *, as_json: bool) -> int:
    """Read a batch script; nothing in it is run."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check the path") from error
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, not a batch script",
            fix=f"paceline doctor --startup {path} says what its start costs",
        )
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            f"{path} is larger than 1 MiB, and no batch script",
            fix="name the script that sbatch is given",
        )
    text = content.decode(errors="replace")
    found = find_mistakes(text)
    if as_json:
        _print_json({"script": str(path)}, found)
    else:
        print(
            "\n".join(map(plain, format_findings(found)))
            if found
            else f"ok       {path}: none of the known mistakes in {len(text.splitlines())} lines"
        )
    return 0 if all_ok(found) else 1


def _look(known: argparse.Namespace) -> int:
    allocation = _allocation()
    wanted = expand_hostlist(known.nodes) if known.nodes else []
    ranks = known.ranks or (allocation.ranks_per_node if allocation else 1)
    plan = multi_host.ExaminationPlan(ranks, known.runs.absolute(), known.wait, known.quick)
    looked: multi_host.Examination | bool
    if allocation and not known.rendezvous:
        looked = multi_host.examine_allocation(
            multi_host.select_nodes(allocation, wanted), plan, os.environ
        )
    elif wanted:
        looked = _look_by_hand(known, wanted, plan)
    else:
        torch = None if known.quick else query_torch()
        looked = multi_host.Examination(
            examine_host(os.environ, plan.runs, ranks, torch=torch), 1, ranks
        )
    if isinstance(looked, bool):
        said = (
            f"{'all is well' if looked else 'there are problems'}: {wanted[0]} shows what was found"
        )
        print(json.dumps({"ok": looked, "shown_on": wanted[0]}) if known.json else said)
        return 0 if looked else 1
    return _show(looked, as_json=known.json)


def _allocation() -> Allocation | None:
    try:
        return allocation_from(os.environ)
    except ConfigError as error:
        raise ConfigError(
            error.problem,
            fix="start the doctor once, without srun: it starts its own ranks on all nodes",
        ) from error


def _look_by_hand(
    known: argparse.Namespace, wanted: Sequence[str], plan: multi_host.ExaminationPlan
) -> multi_host.Examination | bool:
    if len(wanted) < 2:
        raise ConfigError(
            f"--nodes {known.nodes} is one host", fix="leave it out to look at this host alone"
        )
    meet = split_address(known.rendezvous or f"{wanted[0]}:{_PORT}")
    node = (
        known.node
        if known.node is not None
        else multi_host.own_index(wanted, [address for _, address in own_addresses()])
    )
    if node is None or not 0 <= node < len(wanted):
        raise ConfigError(
            f"this host ({os.uname().nodename}) is none of {', '.join(wanted)}",
            fix="type the command on each of the hosts that it names, by names or addresses of theirs; inside a Slurm allocation, once is enough",
        )
    if node == 0:
        print(
            f"waiting for {len(wanted) - 1} more: type the same on {', '.join(wanted[1:])}",
            file=sys.stderr,
            flush=True,
        )
    return multi_host.examine_together(node, wanted, meet, plan, os.environ)


def _show(looked: multi_host.Examination, *, as_json: bool) -> int:
    ok = all_ok(looked.findings)
    if as_json:
        _print_json({"hosts": looked.hosts, "ranks": looked.ranks}, looked.findings)
    else:
        print("\n".join(map(plain, format_findings(looked.findings, looked.hosts))))
        count = sum(not one.ok for one in looked.findings)
        print("\nall is well" if ok else f"\n{count} problem{'s' * (count > 1)}")
    return 0 if ok else 1


def _print_json(head: dict[str, Any], found: Sequence[Finding]) -> None:
    print(
        json.dumps(
            {"ok": all_ok(found), **head, "findings": [as_dict(one) for one in found]}, indent=2
        )
    )
