"""The rules over files: direction of imports, folders that need each other, the torch-free side, and what is never done."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(SOURCE.rglob("*.py"))

FLOORS = [
    {"units", "errors", "handover", "version", "terminal", "help_layout"},
    {
        "rundir",
        "main_script",
        "verified",
        "runlock",
        "redact",
        "safe_open",
        "config",
        "events",
        "dtypes",
        "tensorfile",
        "objectstore",
    },
    {"world", "scale", "launch", "cluster", "telemetry", "hang"},
    {"data", "checkpoint", "kernels"},
    {"exact"},
    {"train"},
    {"recipes"},
    {"plot"},
    {"measure", "verify", "doctor", "report", "course"},
    {"cli"},
    {"notebook"},
    {"__main__"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}

WITHOUT_TORCH = [
    "paceline", "paceline.errors", "paceline.handover", "paceline.config", "paceline.events", "paceline.rundir", "paceline.redact", "paceline.dtypes", "paceline.scale.batch",
    "paceline.scale.tree", "paceline.scale.lr", "paceline.launch.supervisor", "paceline.launch.rank_local", "paceline.world.world",
    "paceline.world.detect", "paceline.data.order", "paceline.data.mnist_idx", "paceline.data.hdf5.chunks", "paceline.data.hdf5.file", "paceline.objectstore", "paceline.data.shards.remote_store", "paceline.data.download", "paceline.data.shards.check", "paceline.data.shards.show", "paceline.data.vocabulary", "paceline.data.pack", "paceline.data.bench", "paceline.verify.compare_worlds", "paceline.recipes",
    "paceline.measure.bench_plan", "paceline.measure.bench_fit", "paceline.measure.bench_results", "paceline.plot.svg_file", "paceline.measure.scaling", "paceline.measure.scaling_report",
    "paceline.doctor.multi_host", "paceline.doctor.startup_run", "paceline.doctor.pack", "paceline.doctor.torch_probe", "paceline.cli.doctor_startup",
    "paceline.world.network", "paceline.world.job", "paceline.telemetry.heartbeat", "paceline.launch.rank_srun", "paceline.cluster.submission",
    "paceline.cluster.allocation", "paceline.cluster.parallelcluster", "paceline.report.state", "paceline.report.page.document", "paceline.cli.report", "paceline.runlock", "paceline.checkpoint.catalog", "paceline.checkpoint.export", "paceline.cli.ckpt_import", "paceline.checkpoint.remote_storage", "paceline.cli.main",
    "paceline.measure.profile", "paceline.measure.scaling_store", "paceline.telemetry.stragglers", "paceline.telemetry.rank_times",
    "paceline.report.failure", "paceline.hang.watchdog", "paceline.course.catalog", "paceline.course.run_lesson", "paceline.course.exercise", "paceline.cli.lesson", "paceline.notebook.extension", "paceline.notebook.cell", "paceline.notebook.curves",
]  # fmt: skip


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_in(folder: Path, package: str) -> dict[str, Path]:
    """Return the modules below a folder by their dotted names."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [*package.split("."), *path.relative_to(folder).with_suffix("").parts]
        found[".".join(part for part in parts if part not in {"", "__init__"})] = path
    return found


@functools.cache
def imports_of(path: Path) -> list[tuple[str, set[str]]]:
    """Return what a file imports: modules, and what is taken from each."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, {f"{node.module}.{alias.name}" for alias in node.names}))
        elif isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
    return found


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Return which of the known modules a file imports anywhere, also for types alone."""
    found = set()
    for module, inner in imports_of(path):
        found |= inner & known or {module}
    return found & known


def edges_between(name_in_graph: Callable[[str, Path], str]) -> set[tuple[str, str]]:
    """Return which parts of the package import which others, each file by the name of its part."""
    modules = modules_in(SOURCE, "paceline")
    modules.pop("paceline")  # the table of public names points everywhere, and imports nothing
    parts = {name: name_in_graph(name, path) for name, path in modules.items()}
    known = set(modules)
    return {
        (parts[name], parts[other])
        for name, path in modules.items()
        for other in imported_modules(path, known)
        if parts[name] != parts[other]
    }


def package_of(name: str, path: Path) -> str:
    return name.split(".")[1]


def folder_of(name: str, path: Path) -> str:
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def test_imports_go_down_and_never_in_a_circle():
    packages = edges_between(package_of)
    assert {one for edge in packages for one in edge} == set(FLOOR)
    above = [f"{one} imports {other}" for one, other in packages if FLOOR[other] > FLOOR[one]]
    assert above == []
    sort(packages)
    for folder, package in ((SOURCE, "paceline"), (BENCHMARKS, ""), (BENCHMARKS / "gpu", "")):
        modules = modules_in(folder, package)
        modules.pop("paceline", None)
        for name, path in modules.items():
            modules[name] = imported_modules(path, set(modules)) - {name}
        sort((name, other) for name, others in modules.items() for other in others)


def sort(edges: Iterable[tuple[str, str]]) -> None:
    """Sort a graph; a CycleError names the circle."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for one, other in edges:
        sorter.add(one, other)
    tuple(sorter.static_order())


KNOWN_PAIRS = {
    ("paceline", "paceline.cli"),
    ("paceline", "paceline.config"),
    ("paceline.data", "paceline.data.pack"),
    ("paceline.data", "paceline.data.reading"),
    ("paceline.data", "paceline.data.shards"),
    ("paceline.data.hdf5", "paceline.data.pack"),
    ("paceline.data.hdf5", "paceline.data.reading"),
    ("paceline.data.pack", "paceline.data.shards"),
    ("paceline.data.reading", "paceline.data.shards"),
}
"""Folders that import each other both ways today; the list may only become shorter."""


def test_no_two_folders_import_each_other():
    edges = edges_between(folder_of)
    both = {(one, other) for one, other in edges if one < other and (other, one) in edges}
    assert both == KNOWN_PAIRS, both ^ KNOWN_PAIRS


def test_what_runs_outside_the_ranks_does_not_import_torch():
    lines = [
        f"import {name}; assert 'torch' not in sys.modules, {name!r}" for name in WITHOUT_TORCH
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import sys", *lines])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_nothing():
    script = "import os; before = dict(os.environ); import signal; handlers = [signal.getsignal(n) for n in (2, 15)]\n"
    script += "import paceline, paceline.train.trainer\n"
    script += "assert handlers == [signal.getsignal(n) for n in (2, 15)]\n"
    script += "assert {k for k in before.keys() ^ os.environ.keys() if not k.startswith('TORCHINDUCTOR')} == set()\n"
    subprocess.run([sys.executable, "-c", script], check=True)


RUN_BY_READERS = [
    file
    for room in ("benchmarks", "examples", "lessons", "scripts")
    for file in sorted((ROOT / room).rglob("*.py"))
]


READS_A_PICKLE = "paceline.checkpoint.importing.torch_file"
RESTRICTED = 'torch.load(source, map_location="cpu", weights_only=True)'


def test_no_pickle_no_shell_and_no_open_port():
    never = r"pickle\.loads?\b|torch\.load\(|allow_pickle=True|shell=True|os\.system|0\.0\.0\.0|broadcast_object|gather_object|eval\(|exec\("
    found = []
    for path in [*MODULES, *RUN_BY_READERS]:
        # Neither runs what it reads.
        text = re.sub(r"\.eval\(|ast\.literal_eval\(", "", path.read_text(encoding="utf-8"))
        if path == modules_in(SOURCE, "paceline")[READS_A_PICKLE]:
            # `paceline ckpt import` reads files of other programs: by this one call, which runs no code of the file.
            assert text.count(RESTRICTED) == 1
            text = text.replace(RESTRICTED, "")
        found += [f"{path}: {match[0]}" for match in re.finditer(never, text)]
    found += [
        f"{path} imports {READS_A_PICKLE}, which is a process of its own"
        for path in MODULES
        if imported_modules(path, {READS_A_PICKLE})
    ]
    assert not found, found


def test_errors_always_carry_a_fix():
    with pytest.raises(TypeError, match="fix"):
        paceline.PacelineError("only a problem")


def test_the_public_names_are_those_that_are_listed():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    declared = {
        alias.asname
        for node in ast.walk(tree_of(SOURCE / "__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # IPython alone calls the last one.
    assert declared - {None} == {*paceline.__all__, "load_ipython_extension"}


def test_only_the_world_reads_who_it_is():
    reads = r"environ(\.get)?[\[(][\"'](RANK|WORLD_SIZE|LOCAL_RANK|SLURM_(?!CONF)|OMPI_|PMI_)"
    others = [path for path in MODULES if path.name != "detect.py"]
    assert [path for path in others if re.search(reads, path.read_text(encoding="utf-8"))] == []
