"""Measure collectives between ranks: is every result right, and how long does it take by message size? Started by srun, torchrun or mpirun, it measures the ranks that are there."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.cli.run import add_host_arguments, place_from, start
from paceline.cluster.allocation import allocation_from
from paceline.errors import ConfigError
from paceline.launch.spec import module
from paceline.measure.bench_plan import OPERATIONS, BenchPlan, operations_from, sizes_from
from paceline.measure.bench_results import Measurement, as_dict, plot_of, results_of
from paceline.measure.bench_table import print_results
from paceline.rundir import make_private, write_whole, writing_to
from paceline.world.detect import detect_world

HELP = "all-reduce and its kin between ranks: right, and how fast, by message size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    parser.add_argument(
        "-n",
        "--ranks",
        default="",
        help="ranks to start on this machine (default 2); in a Slurm allocation: on each node; not under srun, torchrun or mpirun",
    )
    words = "; ".join(f"{name}: {what}" for name, what in OPERATIONS.items())
    parser.add_argument(
        "--ops", default="", help=f"operations, with commas between (default: all). {words}"
    )
    parser.add_argument(
        "--sizes",
        default="",
        help="sizes with commas between, or FIRST:LAST in steps of 4 (default: 1KiB:16MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="go on so long, for 3 rounds at least and 50 at most (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where messages lie"
    )
    parser.add_argument(
        "--backend", choices=("auto", "gloo", "nccl"), default="auto", help="what carries them"
    )
    parser.add_argument(
        "--to", default="", metavar="FOLDER", help="write bench.json and bench.svg there, too"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_host_arguments(parser)


def main(known: argparse.Namespace) -> int:
    """Measure; exit with 0 if every result was right, else with 1."""
    if known.arguments:
        raise ConfigError(
            f"unexpected word {known.arguments[0]!r}", fix="see `paceline bench --help`"
        )
    plan = BenchPlan(
        operations_from(known.ops),
        sizes_from(known.sizes),
        known.seconds,
        known.device,
        known.backend,
    )
    here = detect_world(os.environ, os.getppid())
    if here.size == 1:
        return _start(plan, known)
    if known.ranks:
        raise ConfigError(
            f"{here.size} ranks are here already, and each would start {known.ranks} more",
            fix="leave -n out, or start `paceline bench -n` once, without srun, torchrun or mpirun",
        )
    from paceline.measure.bench import measure

    found = measure(plan)
    if here.is_main:
        _show(found, known)
    return int(found.wrong > 0)


def _start(plan: BenchPlan, known: argparse.Namespace) -> int:
    """Start ranks as `paceline run` does; what they found comes back in a file."""
    place = place_from(known)
    allocation = allocation_from(os.environ) if place.nodes == 1 else None
    known.ranks = known.ranks or ("" if allocation else "2")
    known.max_restarts, known.stop_after = 0, ""
    shared = Path.cwd() if allocation and not allocation.is_local else None
    with tempfile.TemporaryDirectory(prefix=".paceline-bench-", dir=shared) as folder:
        file = Path(folder) / "found.json"
        known.arguments = [replace(plan, to=str(file)).as_json()]
        with Path(os.devnull).open(
            "w", encoding="utf-8"
        ) as nowhere:  # what ranks say is not for our own output
            code = start(module("bench", "paceline.measure.bench"), known, place, screen=nowhere)
        if code or place.node:
            return code
        found = Measurement.from_json(file.read_text(encoding="utf-8"))
    _show(found, known)
    return int(found.wrong > 0)


def _show(found: Measurement, known: argparse.Namespace) -> None:
    """Print the figures, and write them where that was asked for."""
    results = results_of(found)
    svg = plot_of(found, results)
    text = json.dumps(as_dict(found, results, svg), indent=2)
    if known.json:
        print(text)
    else:
        print_results(found, results)
    if known.to:
        folder = Path(known.to)
        with writing_to(folder, "give another folder with --to"):
            make_private(folder)
            write_whole(folder / "bench.json", f"{text}\n".encode())
            write_whole(folder / "bench.svg", svg.encode())
