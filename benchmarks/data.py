"""What does a record cost until it stands in a batch?

`python benchmarks/data.py` reads the same records with a bare memory-map, with Paceline and with its peers: shuffled, page cache
warm, batches ready as torch tensors, one thread. Each round starts every contender once in fresh processes, in rotated
order; ratios are to the memory-map of the same round and world. Imports and the writing of sets are not measured. The first
epoch (which opens the set; Paceline verifies its sums in it) is told apart from the later ones, of which there are two or
more, until a second has passed. CPU time is user and system time of all processes. After that each contender
reads one more epoch in which every record is looked at: each must have come once, with its own label. At world 2 two
processes read half of every batch each, and their CPU times are added.

Then: how long it takes to the first batch from somewhere within an epoch, in a fresh process, for those who have a
documented way to begin there; whether that batch is the one that would have come is checked. And what a set of
100 million records costs Paceline at the start.

The peers live in an environment of their own, which is made when it is missing; by hand, in the root of the checkout:

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install -r benchmarks/requirements.txt
    .venv-peers/bin/pip install --no-deps -r benchmarks/requirements-alone.txt
    .venv-peers/bin/pip install --no-deps -e .
    cat benchmarks/requirements.txt benchmarks/requirements-alone.txt > .venv-peers/requirements.txt
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from data_runs import (
    CONTENDERS,
    PLACES,
    Bench,
    Kind,
    make_sets,
    measure_reading,
    measure_resume,
    measure_scale,
)
from peers import peers_python
from ratios import ratios, spread, table

KINDS = {"small": Kind("small", 60_000, 28, 128), "large": Kind("large", 4_000, 256, 64)}
QUICK = {"small": Kind("small", 2_000, 28, 128), "large": Kind("large", 336, 256, 64)}
REFERENCE = "memory-map"
WITHOUT_RESUME = {"webdataset", "loader", "hdf5", "hdf5-chunks"}
PARTS = ("reading", "resume", "scale")
PACKAGES = {
    "torch",
    "numpy",
    "litdata",
    "datasets",
    "pyarrow",
    "grain",
    "array_record",
    "mosaicml-streaming",
}
PACKAGES |= {"webdataset", "h5py", "xxhash"}


def report_reading(part: dict[str, Any], names: Sequence[str], world: int) -> str:
    """Return a table of all contenders at one world against the memory-map."""
    found, problems = part["found"], part["problems"]
    head = ["contender", "CPU ratio", "CPU ns/record", "wall ratio", "wall ns/record"]
    head += ["first epoch: CPU ratio", "CPU ns/record", "wall ns/record"]
    rows = []
    for name in (name for name in names if world in CONTENDERS[name].worlds):
        mine, base = found.get(f"{world} {name}"), found.get(f"{world} {REFERENCE}")
        if name in problems or not mine or not base:
            rows.append([CONTENDERS[name].label, problems.get(name, "no reference"), *[""] * 6])
            continue
        ratio = {clock: spread(ratios(values, base[clock])) for clock, values in mine.items()}
        value = {clock: spread(values, 0) for clock, values in mine.items()}
        cells = [
            ratio["later_cpu_ns"],
            value["later_cpu_ns"],
            ratio["later_wall_ns"],
            value["later_wall_ns"],
        ]
        cells += [ratio["first_cpu_ns"], value["first_cpu_ns"], value["first_wall_ns"]]
        rows.append([CONTENDERS[name].label, *cells])
    return table(head, rows)


def report_resume(part: dict[str, Any], names: Sequence[str]) -> str:
    """Return a table of the time to the first batch, by where it is."""
    found, problems = part["found"], part["problems"]
    rows = []
    for name in names:
        if name in problems or name in WITHOUT_RESUME:
            rows.append(
                [
                    CONTENDERS[name].label,
                    problems.get(name, "no documented way"),
                    *[""] * len(PLACES),
                ]
            )
        elif name in found:
            right = "yes" if found[name]["right"] else "no"
            rows.append(
                [
                    CONTENDERS[name].label,
                    *(spread(ms, 1) for ms in zip(*found[name]["ms"], strict=True)),
                    right,
                ]
            )
    return table(
        ["ms to the first batch, from", *(f"{place:.0%}" for place in PLACES), "right batch"], rows
    )


def report_scale(found: dict[str, Any]) -> str:
    """Return a table of what a very large set costs at the start."""
    head = ["set", "ms to the first batch", "own memory, MB", "mapped from files, MB"]
    return table(
        head,
        ([label, *(spread(values, 1) for values in row.values())] for label, row in found.items()),
    )


def facts(bench: Bench) -> dict[str, Any]:
    """Return what the measurements depend on."""
    (folder,) = bench.python.parent.parent.glob("lib/python*/site-packages")
    versions = {
        each.name: each.version
        for each in distributions(path=[str(folder)])
        if each.name in PACKAGES
    }
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
    } | versions


def measure(
    bench: Bench, known: argparse.Namespace, kinds: Sequence[Kind], names: Sequence[str]
) -> dict[str, Any]:
    """Measure all that was asked for."""
    found: dict[str, Any] = {"facts": facts(bench), "reading": {}, "resume": {}, "scale": {}}
    for kind in kinds if {"reading", "resume"} & set(known.parts) else []:
        bench.problems = {}
        make_sets(bench, kind, names)
        if "reading" in known.parts:
            measured = measure_reading(bench, kind, names, known.rounds)
            found["reading"][kind.name] = {"found": measured, "problems": dict(bench.problems)}
        if "resume" in known.parts:
            measured = measure_resume(bench, kind, names, known.resume_rounds)
            found["resume"][kind.name] = {"found": measured, "problems": dict(bench.problems)}
    if "scale" in known.parts:
        found["scale"] = measure_scale(bench, known.scale, known.resume_rounds)
    return found | {"load_after": os.getloadavg()}


def show(
    found: dict[str, Any], kinds: Sequence[Kind], names: Sequence[str], known: argparse.Namespace
) -> None:
    """Print the tables."""
    print(
        ", ".join(f"{key} {value}" for key, value in found["facts"].items()),
        f"; load after {found['load_after']}",
    )
    for kind in kinds:
        size = f"{kind.records:,} records of {kind.side} x {kind.side} bytes and a label, batch {kind.batch}"
        for world in (1, 2) if kind.name in found["reading"] else ():
            print(
                f"\n{size}, world {world}, {known.rounds} rounds; median (min-max); later epochs, then the first\n"
            )
            print(report_reading(found["reading"][kind.name], names, world))
        if kind.name in found["resume"]:
            print(f"\nBegin within an epoch: {size}; {known.resume_rounds} rounds\n")
            print(report_resume(found["resume"][kind.name], names))
    if found["scale"]:
        print(
            f"\nA set of {known.scale:,} records of 8 bytes, 200 batches of 128 read; {known.resume_rounds} rounds\n"
        )
        print(report_scale(found["scale"]))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of reading")
    parser.add_argument("--resume-rounds", type=int, default=3, help="rounds of the other parts")
    parser.add_argument(
        "--records",
        choices=["small", "large", "both"],
        default="both",
        help="MNIST-shaped, or of 64 KB",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(CONTENDERS),
        choices=list(CONTENDERS),
        help="contenders beside the memory-map",
    )
    parser.add_argument(
        "--parts", nargs="*", default=list(PARTS), choices=PARTS, help="what is measured"
    )
    parser.add_argument("--json", action="store_true", help="print every reading as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="few records, one round: to see that all of it runs"
    )
    known = parser.parse_args()
    known.scale = 100_000_000
    if known.quick:
        known.rounds, known.resume_rounds, known.scale = 1, 1, 1_000_000
    return known


def main() -> None:
    """Measure and print."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # else the sets, several GB, would stay behind
    known = parse()
    names = [name for name in CONTENDERS if name == REFERENCE or name in known.only]
    kinds = [
        kind
        for name, kind in (QUICK if known.quick else KINDS).items()
        if known.records in {name, "both"}
    ]
    with tempfile.TemporaryDirectory(prefix="paceline-data-") as folder:
        bench = Bench(peers_python(), Path(folder), least_s=0.0 if known.quick else 1.0)
        found = measure(bench, known, kinds, names)
    if known.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, kinds, names, known)


if __name__ == "__main__":
    main()
