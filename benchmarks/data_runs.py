"""How are the contenders of data.py run? In fresh processes, one after the other, round by round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ratios import rotated

HERE = Path(__file__).resolve().parent
PATIENCE_S = 900.0
PLACES = (0.0, 0.25, 0.5, 0.9)
"""Parts of an epoch that are left out when reading begins within it."""
SCALE = {
    "100 shards": (100, 100),
    "10,000 shards, which are 100 files under several names": (10_000, 100),
}


@dataclass(frozen=True)
class Contender:
    """A row of the tables."""

    label: str
    form: str
    """The set that it reads."""
    worlds: tuple[int, ...] = (1,)
    resumes: bool = False
    """Whether it has a documented way to begin within an epoch."""


CONTENDERS = {
    "memory-map": Contender("numpy memory-map, batched gather", "arrays", (1, 2)),
    "memory-map-take": Contender("numpy memory-map, `take` into reused memory", "arrays", (1, 2)),
    "paceline": Contender("Paceline, one lane a rank", "shards", (1, 2), resumes=True),
    "paceline-4-lanes": Contender("Paceline, 4 lanes", "shards", (1, 2)),
    "paceline-windows": Contender(
        "Paceline, 64 shards, windows of 16", "many-shards", (1, 2), resumes=True
    ),
    "paceline-hdf5": Contender("Paceline, chunked HDF5 as it is", "hdf5-chunked", resumes=True),
    "hdf5-chunks": Contender("HDF5 chunk by chunk, by hand", "hdf5-chunked"),
    "loader": Contender("DataLoader, per sample, memory-map", "arrays"),
    "loader-2": Contender("DataLoader, per sample, memory-map, 2 workers", "arrays"),
    "litdata": Contender("litdata", "litdata", resumes=True),
    "datasets": Contender("HF datasets, torch format", "arrow", resumes=True),
    "datasets-arrow": Contender("HF datasets, arrow tables made tensors by hand", "arrow"),
    "grain": Contender("grain, ArrayRecord, no threads", "array-record", resumes=True),
    "grain-16": Contender("grain, ArrayRecord, 16 threads (its default)", "array-record"),
    "grain-memory-map": Contender("grain, memory-map, no threads", "arrays"),
    "hdf5": Contender("DataLoader, per sample, contiguous HDF5", "hdf5"),
    "streaming": Contender("MosaicML streaming", "mds", resumes=True),
    "webdataset": Contender("webdataset", "tar"),
}


@dataclass(frozen=True)
class Kind:
    """Records of one size."""

    name: str
    records: int
    side: int
    batch: int


@dataclass
class Bench:
    """What is measured with, and what could not be."""

    python: Path
    folder: Path
    """For all sets, and whatever else is written."""
    least_s: float
    problems: dict[str, str] = field(default_factory=dict)
    """Why a contender has no measurements."""

    def run(self, script: str, *words: str) -> str:
        """Run a script to its end; return what it printed."""
        (printed,) = self.run_together([[script, *words]])
        return printed

    def run_together(self, commands: Iterable[Sequence[str]]) -> list[str]:
        """Run scripts at the same time; return what each printed."""
        home = {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        kept: Any = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": os.environ | home,
        }
        started = [
            subprocess.Popen([str(self.python), str(HERE / script), *words], **kept)
            for script, *words in commands
        ]
        try:
            printed = [process.communicate(timeout=PATIENCE_S) for process in started]
        except subprocess.TimeoutExpired as error:
            raise Failed(f"failed: not done after {PATIENCE_S:.0f} s") from error
        finally:
            for process in started:
                process.kill()  # which does nothing to those that have ended
        for process, (_, errors) in zip(started, printed, strict=True):
            if process.returncode:
                raise Failed(why(errors))
        return [output for output, _ in printed]

    def measure(self, mode: str, name: str, kind: Kind, world: int = 1, **extra: Any) -> list[Any]:
        """Have a contender measured; return what each rank found."""
        task = {"folder": str(self.folder / kind.name), "world": world} | asdict(kind) | extra
        del task["name"]
        warm(self.folder / kind.name / CONTENDERS[name].form)
        with tempfile.TemporaryDirectory(dir=self.folder) as found:
            tasks = [json.dumps(task | {"rank": rank}) for rank in range(world)]
            self.run_together(["data_measure.py", mode, name, task, found] for task in tasks)
            return [
                json.loads((Path(found) / f"{mode}-{rank}.json").read_text())
                for rank in range(world)
            ]

    def attempt(self, names: Iterable[str], work: Callable[[], Any]) -> Any:
        """Do some work; if that fails, the contenders for which it was done have no measurements, and are told why."""
        try:
            return work()
        except Failed as problem:
            for name in names:
                self.problems[name] = str(problem)
                note(f"{name}: {problem}")
            return None


class Failed(Exception):
    """A contender could not be run."""


def why(errors: str) -> str:
    """Return the last line of what a process complained of.

    >>> why("Traceback:\\nModuleNotFoundError: No module named 'grain'")
    "not installable here: No module named 'grain'"
    """
    last = (errors.strip().splitlines() or ["it ended without a word"])[-1]
    kind, _, text = last.partition(": ")
    return (
        f"not installable here: {text}"
        if kind in {"ModuleNotFoundError", "ImportError"}
        else f"failed: {last}"
    )


def warm(folder: Path) -> None:
    """Bring a set into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def make_sets(bench: Bench, kind: Kind, names: Sequence[str]) -> None:
    """Write the same records in every form that is needed."""
    (bench.folder / kind.name).mkdir(mode=0o700)
    forms = ["arrays", *sorted({CONTENDERS[name].form for name in names} - {"arrays"})]
    for form in forms:
        note(f"{kind.name}: writing {form}")
        users = [name for name in names if CONTENDERS[name].form == form]
        words = form, str(bench.folder / kind.name), str(kind.records), str(kind.side)
        bench.attempt(users, partial(bench.run, "data_formats.py", *words))


def measure_reading(bench: Bench, kind: Kind, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Have all contenders read, round by round; return the figures of each by world and name, a list for each clock."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    keys = [f"{world} {name}" for name in names for world in CONTENDERS[name].worlds]
    for number in range(rounds):
        for key in rotated(keys, number * len(keys) // rounds):
            world, name = key.split()
            if name not in bench.problems:
                costs = (
                    bench.attempt([name], partial(read_once, bench, name, kind, int(world))) or {}
                )
                for clock, value in costs.items():
                    found[key][clock].append(value)
                told = ", ".join(f"{clock} {value:.0f}" for clock, value in costs.items())
                note(f"{kind.name}, round {number + 1}/{rounds}: {name} at world {world}: {told}")
    return {key: dict(values) for key, values in found.items()}


def read_once(bench: Bench, name: str, kind: Kind, world: int) -> dict[str, float]:
    """Return what a record costs one contender, in ns: in the first epoch, and in later ones."""
    ranks = bench.measure("read", name, kind, world, least_s=bench.least_s)
    labels = [label for rank in ranks for label in rank["labels"]]
    if sorted(labels) != list(range(kind.records)) or labels == sorted(labels):
        raise Failed(
            f"failed: of {kind.records} records {len(set(labels))} came, {len(labels)} in all, or not shuffled"
        )
    costs = {}
    for epochs in ("first", "later"):
        parts = [rank[epochs] for rank in ranks]
        cpu_s = sum(part["cpu_s"] for part in parts) / sum(part["records"] for part in parts)
        costs |= {f"{epochs}_cpu_ns": cpu_s * 1e9}
        costs |= {
            f"{epochs}_wall_ns": 1e9 / sum(part["records"] / part["wall_s"] for part in parts)
        }
    return costs


def measure_resume(bench: Bench, kind: Kind, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return how many ms passed until the first batch, for each round and place, and whether it was the right one."""
    places = [int(place * -(-kind.records // kind.batch)) for place in PLACES]
    found: dict[str, Any] = defaultdict(lambda: {"ms": [], "right": True})
    noted: dict[str, Any] = {}
    names = [name for name in names if CONTENDERS[name].resumes and name not in bench.problems]
    for name in names:
        noted[name] = bench.attempt(
            [name], partial(bench.measure, "states", name, kind, places=places)
        )
    for number in range(rounds):
        for name in rotated(names, number):
            if name not in bench.problems:
                firsts = (
                    bench.attempt(
                        [name], partial(begin_everywhere, bench, name, kind, noted[name][0])
                    )
                    or []
                )
                found[name]["ms"].append([first["ms"] for first in firsts])
                found[name]["right"] &= all(first["right"] for first in firsts)
                note(
                    f"{kind.name}, resume, round {number + 1}/{rounds}: {name} {found[name]['ms'][-1]} ms"
                )
    return dict(found)


def begin_everywhere(bench: Bench, name: str, kind: Kind, noted: dict[str, Any]) -> list[Any]:
    """Have a contender begin at every place, each time in a fresh process."""
    return [
        bench.measure("resume", name, kind, place=int(place), noted=state)[0]
        for place, state in noted.items()
    ]


def measure_scale(bench: Bench, records: int, rounds: int) -> dict[str, Any]:
    """Return what a very large set costs Paceline at the start, by set and by where reading begins."""
    found: dict[str, Any] = {}
    for number, (label, (shards, files)) in enumerate(SCALE.items()):
        folder = bench.folder / f"scale-{number}"
        note(f"writing {records:,} records in {label}")
        bench.run("data_scale.py", "make", *map(str, (folder, records, shards, files)))
        for start in (0.0, 0.5):
            runs = [
                json.loads(bench.run("data_scale.py", "measure", str(folder), str(start)))
                for _ in range(rounds)
            ]
            found[f"{label}, from {start:.0%} on"] = {
                key: [run[key] for run in runs] for key in runs[0]
            }
    return found


def note(text: str) -> None:
    """Say how far the benchmark is."""
    sys.stderr.write(f"{text}\n")
