"""`paceline bench`: check and time collectives between ranks."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.cli.run import HostArguments, LaunchArguments, place_from, start
from paceline.cluster.allocation import allocation_from
from paceline.config.arguments import option
from paceline.errors import ConfigError
from paceline.launch.spec import module
from paceline.measure.bench_page import to_html
from paceline.measure.bench_plan import BenchPlan, operations_from, sizes_from
from paceline.measure.bench_results import Measurement, as_dict, plot_of, results_of
from paceline.measure.bench_table import print_results
from paceline.rundir import make_private, write_whole, writing_to
from paceline.terminal import plain
from paceline.world.detect import detect_world


@dataclass(frozen=True, kw_only=True)
class BenchArguments(HostArguments):
    """Checks every result. Started by srun, torchrun or mpirun, it measures the ranks that those launched."""

    ranks: str = option("", "-n", "--ranks", metavar="N")
    """Ranks to start on this machine (default: 2); in a Slurm allocation: per node. Not under srun, torchrun or mpirun."""
    ops: str = option("", metavar="OP,OP")
    """Operations, separated by commas (default: all): all-reduce, all-gather, reduce-scatter, all-to-all, tree (Paceline's sum in a fixed order) or pair (first and last rank, one way)."""
    sizes: str = option("", metavar="SIZES")
    """Message sizes separated by commas, or FIRST:LAST by factors of 4 (default: 1KiB:16MiB)."""
    seconds: float = option(20.0, metavar="S")
    """Time to measure, within 3 to 50 rounds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the messages."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the collectives."""
    to: str = option("", metavar="FOLDER")
    """Also write bench.html, bench.svg and bench.json into this folder."""
    json: bool = False
    """Print the measurements as JSON."""


def main(arguments: BenchArguments) -> int:
    """Measure; return 0 if every result was correct, else 1."""
    plan = BenchPlan(
        operations_from(arguments.ops),
        sizes_from(arguments.sizes),
        arguments.seconds,
        arguments.device,
        arguments.backend,
    )
    world = detect_world(os.environ, os.getppid())
    if world.size == 1:
        return _start(plan, arguments)
    if arguments.ranks:
        raise ConfigError(
            f"-n {arguments.ranks} would start more ranks on each of {world.size} launched ranks",
            fix="remove -n, or run `paceline bench -n` once without srun, torchrun or mpirun",
        )
    from paceline.measure.bench import measure

    measurement = measure(plan)
    if world.is_main:
        _show(measurement, arguments)
    return int(measurement.wrong > 0)


def _start(plan: BenchPlan, arguments: BenchArguments) -> int:
    """Start ranks as `paceline run` does; they return their measurements in a file."""
    place = place_from(arguments)
    allocation = allocation_from(os.environ) if place.nodes == 1 else None
    ranks = arguments.ranks or ("" if allocation else "2")
    launch = LaunchArguments(ranks=ranks, max_restarts=0)
    shared = Path.cwd() if allocation and not allocation.is_local else None
    program = module("bench", "paceline.measure.bench")
    with tempfile.TemporaryDirectory(prefix=".paceline-bench-", dir=shared) as folder:
        file = Path(folder) / "found.json"
        words = [replace(plan, to=str(file)).as_json()]
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:  # output of the ranks
            code = start(program, launch, words, place, screen=nowhere)
        if code or place.node:
            return code
        measurement = Measurement.from_json(file.read_text(encoding="utf-8"))
    _show(measurement, arguments)
    return int(measurement.wrong > 0)


def _show(measurement: Measurement, arguments: BenchArguments) -> None:
    """Print the results, and write them into the folder of --to."""
    results = results_of(measurement)
    svg = plot_of(measurement, results)
    text = json.dumps(as_dict(measurement, results, svg), indent=2)
    if arguments.json:
        print(text)
    else:
        print_results(measurement, results)
    if arguments.to:
        folder = Path(arguments.to)
        with writing_to(folder, "give another folder with --to FOLDER"):
            make_private(folder)
            write_whole(folder / "bench.json", f"{text}\n".encode())
            write_whole(folder / "bench.svg", svg.encode())
            write_whole(folder / "bench.html", to_html(measurement, results))
        if not arguments.json:
            print(f"report: {plain(str(folder / 'bench.html'))}")
