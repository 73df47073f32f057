"""`paceline doctor`: check this machine or allocation, lint batch scripts, measure and pack the startup."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.allocation import Allocation, allocation_from
from paceline.config.arguments import arguments_of, option, positional, rest
from paceline.doctor import multi_host
from paceline.doctor.finding import Finding, all_ok, as_dict, format_findings
from paceline.doctor.mistakes import find_mistakes
from paceline.doctor.single_host import examine_host
from paceline.doctor.software import query_torch
from paceline.errors import ConfigError, did_you_mean
from paceline.launch.spec import script
from paceline.terminal import plain
from paceline.world.address import own_addresses, split_address
from paceline.world.hostlist import expand_hostlist

_PORT = 29400
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Each check prints ok, or the problem and its fix. In a Slurm allocation it checks all nodes."""

    script: str = positional("", metavar="JOB.sh")
    """Batch script to lint; with --startup: a Python script."""
    script_arguments: tuple[str, ...] = rest("ARGUMENT")
    """With --startup: arguments of the script."""
    nodes: str = option("", metavar="HOSTS")
    """Hosts to check together, as a,b or n[1-4]. In a Slurm allocation: some of its nodes (default: all). Without Slurm: type the same command on every host."""
    rendezvous: str = option("", metavar="HOST:PORT")
    """Without Slurm: address where the hosts connect (default: the first host, port 29400)."""
    node: int | None = option(None, metavar="I")
    """Without Slurm: index of this host in --nodes, if its name is not listed there."""
    wait: float = option(300.0, metavar="SECONDS")
    """Time to wait for the other hosts, or for the script of --startup."""
    ranks: int = option(0, "-n", "--ranks")
    """Ranks per host (default: one per GPU or task of the allocation)."""
    runs: Path = option(Path("runs"), metavar="FOLDER")
    """Folder of all runs, which must be writable."""
    quick: bool = False
    """Skip torch, whose import can take minutes on a cold file system."""
    startup: bool = False
    """Measure the startup time of the script up to its first step, or of torch."""
    pack: Path | None = option(None, metavar="FOLDER")
    """Pack the Python environment into one archive, to be unpacked once per node."""
    env: Path | None = option(None, metavar="VENV")
    """With --pack: environment to pack (default: the one that runs this command)."""
    json: bool = False
    """Print the findings as JSON."""


def main(arguments: DoctorArguments) -> int:
    """Run the checks; return 0 if there is no problem, else 1."""
    _check_arguments(arguments)
    if arguments.pack is not None:
        from paceline.cli.doctor_startup import pack

        return pack(arguments.pack, arguments.env, as_json=arguments.json)
    if arguments.startup:
        from paceline.cli.doctor_startup import startup

        words = list(script(arguments.script).argv) if arguments.script else []
        words += arguments.script_arguments
        return startup(words, arguments.wait, as_json=arguments.json)
    if arguments.script:
        return _lint(Path(arguments.script), as_json=arguments.json)
    return _examine(arguments)


def _check_arguments(arguments: DoctorArguments) -> None:
    if arguments.script_arguments and not arguments.startup:
        word = arguments.script_arguments[0]
        flags = [flag for argument in arguments_of(DoctorArguments) for flag in argument.flags]
        near = did_you_mean(word, flags) if word.startswith("-") else "name one batch script"
        raise ConfigError(f"unexpected argument {word!r}", fix=near)
    modes = {
        "--pack": arguments.pack is not None,
        "--startup": arguments.startup,
        "--nodes": bool(arguments.nodes),
        "a batch script": bool(arguments.script) and not arguments.startup,
    }
    given = [mode for mode, is_given in modes.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", fix="give one of them")
    if arguments.env is not None and arguments.pack is None:
        raise ConfigError("--env needs --pack", fix="add --pack FOLDER")
    if arguments.ranks < 0:
        raise ConfigError(f"-n must be at least 1, got {arguments.ranks}", fix="for example: -n 4")
    if arguments.wait <= 0:
        raise ConfigError(
            f"--wait must be above 0, got {arguments.wait:g}", fix="for example: --wait 60"
        )


def _lint(path: Path, *, as_json: bool) -> int:
    """Look for mistakes in a batch script, without running it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check the path") from error
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, not a batch script",
            fix=f"measure its startup with: paceline doctor --startup {path}",
        )
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            f"{path} is larger than 1 MiB, too large for a batch script",
            fix="name the script that is given to sbatch",
        )
    text = content.decode(errors="replace")
    mistakes = find_mistakes(text, (Path(), path.parent))
    if as_json:
        _print_json({"script": str(path)}, mistakes)
    elif mistakes:
        _print_lines(mistakes)
    else:
        print(f"ok       {path}: no known mistake in {len(text.splitlines())} lines")
    return 0 if all_ok(mistakes) else 1


def _examine(arguments: DoctorArguments) -> int:
    """Check this host, the nodes of the allocation, or the hosts of --nodes."""
    allocation = _allocation()
    names = expand_hostlist(arguments.nodes) if arguments.nodes else []
    ranks = arguments.ranks or (allocation.ranks_per_node if allocation else 1)
    plan = multi_host.ExaminationPlan(
        ranks, arguments.runs.absolute(), arguments.wait, arguments.quick
    )
    if allocation and not arguments.rendezvous:
        nodes = multi_host.select_nodes(allocation, names)
        return _show(multi_host.examine_allocation(nodes, plan, os.environ), as_json=arguments.json)
    if not names:
        torch = None if arguments.quick else query_torch()
        findings = examine_host(os.environ, plan.runs, ranks, torch=torch)
        return _show(multi_host.Examination(findings, 1, ranks), as_json=arguments.json)
    examined = _examine_hosts(arguments, names, plan)
    if not isinstance(examined, bool):
        return _show(examined, as_json=arguments.json)
    if arguments.json:
        print(json.dumps({"ok": examined, "shown_on": names[0]}))
    else:
        print(f"{'no problem' if examined else 'problems'} found; details are on {names[0]}")
    return 0 if examined else 1


def _allocation() -> Allocation | None:
    try:
        return allocation_from(os.environ)
    except ConfigError as error:
        raise ConfigError(
            error.problem,
            fix="run `paceline doctor` once, without srun: it starts one process per node itself",
        ) from error


def _examine_hosts(
    arguments: DoctorArguments, names: Sequence[str], plan: multi_host.ExaminationPlan
) -> multi_host.Examination | bool:
    """Check this host together with the others; only the first host gets all findings."""
    if len(names) < 2:
        raise ConfigError(
            f"--nodes {arguments.nodes} is one host", fix="remove it to check this host alone"
        )
    meet = split_address(arguments.rendezvous or f"{names[0]}:{_PORT}")
    node = arguments.node
    if node is None:
        node = multi_host.own_index(names, [address for _, address in own_addresses()])
    if node is None or not 0 <= node < len(names):
        raise ConfigError(
            f"this host ({os.uname().nodename}) is not one of {', '.join(names)}",
            fix="run the command on each host of --nodes; in a Slurm allocation, run it once",
        )
    if node == 0:
        others = ", ".join(names[1:])
        message = f"waiting for {len(names) - 1} more: run the same command on {others}"
        print(message, file=sys.stderr, flush=True)
    return multi_host.examine_together(node, names, meet, plan, os.environ)


def _show(looked: multi_host.Examination, *, as_json: bool) -> int:
    ok = all_ok(looked.findings)
    if as_json:
        _print_json({"hosts": looked.hosts, "ranks": looked.ranks}, looked.findings)
    else:
        _print_lines(looked.findings, looked.hosts)
        count = sum(not finding.ok for finding in looked.findings)
        print("\nno problems found" if ok else f"\n{count} problem{'s' * (count > 1)}")
    return 0 if ok else 1


def _print_lines(findings: Sequence[Finding], host_count: int = 1) -> None:
    for line in format_findings(findings, host_count):
        print(plain(line))


def _print_json(head: dict[str, Any], findings: Sequence[Finding]) -> None:
    facts = [as_dict(finding) for finding in findings]
    print(json.dumps({"ok": all_ok(findings), **head, "findings": facts}, indent=2))
