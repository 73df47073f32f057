"""The rules over files: direction of imports, folders that need each other, the torch-free side, and what is never done."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
MODULES = sorted(SOURCE.rglob("*.py"))

FLOORS = [
    {"units", "errors", "handover", "version", "terminal", "help_layout", "__init__"},
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
    "paceline.world.network", "paceline.world.timelimit", "paceline.telemetry.heartbeat", "paceline.launch.rank_srun", "paceline.cluster.submission",
    "paceline.cluster.allocation", "paceline.cluster.parallelcluster", "paceline.report.state", "paceline.report.page.document", "paceline.cli.report", "paceline.runlock", "paceline.checkpoint.catalog", "paceline.checkpoint.export", "paceline.cli.ckpt_import", "paceline.checkpoint.remote_storage", "paceline.cli.main",
    "paceline.measure.profile", "paceline.measure.scaling_store", "paceline.telemetry.stragglers", "paceline.telemetry.rank_times",
    "paceline.report.failure", "paceline.hang.watchdog", "paceline.course.catalog", "paceline.course.run_lesson", "paceline.course.exercise", "paceline.cli.lesson", "paceline.notebook.extension", "paceline.notebook.cell", "paceline.notebook.curves",
]  # fmt: skip


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "paceline"
                else {node.module}
            )
            found |= names
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("paceline.")}


def test_imports_go_down():
    found = []
    for path in MODULES:
        if path == SOURCE / "__init__.py":
            continue  # the table of public names points everywhere, and imports nothing by itself
        mine = FLOOR[name_of(path)]
        above = {name for name in imports_of(path) if name in FLOOR and FLOOR[name] > mine}
        found += [f"{path} imports {name} from above" for name in sorted(above)]
    assert not found, found


def test_every_package_has_its_floor():
    assert {name_of(path) for path in MODULES} == set(FLOOR)


def test_packages_do_not_import_each_other_in_a_circle():
    edges = {}
    for path in MODULES:
        if path != SOURCE / "__init__.py":
            edges.setdefault(name_of(path), set()).update(imports_of(path) - {name_of(path)})

    def reachable(name, seen=()):
        return {name} | {
            far
            for near in edges.get(name, ())
            if near not in seen
            for far in reachable(near, (*seen, name))
        }

    for name, near in edges.items():
        for other in near:
            assert name not in reachable(other, (name,)) - {other} or name == other, (
                f"{name} and {other} need each other"
            )


def modules_in(folder: Path, package: str) -> dict[str, Path]:
    """Return the modules below a folder by their dotted names."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [*package.split("."), *path.relative_to(folder).with_suffix("").parts]
        found[".".join(part for part in parts if part not in {"", "__init__"})] = path
    return found


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Return which of the known modules a file imports anywhere, also for types alone."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


@pytest.mark.parametrize(
    ("folder", "package"),
    [(SOURCE, "paceline"), (ROOT / "benchmarks", ""), (ROOT / "benchmarks/gpu", "")],
    ids=["src", "benchmarks", "benchmarks/gpu"],
)
def test_no_files_import_each_other_in_a_circle(folder, package):
    modules = modules_in(folder, package)
    modules.pop("paceline", None)  # the table of public names points everywhere
    known = set(modules)
    graph = {name: imported_modules(path, known) - {name} for name, path in modules.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


KNOWN_PAIRS = {
    ("paceline.data.reading", "paceline.data.shards"),
    ("paceline.train.saving", "paceline.train.step"),
    ("paceline.data.hdf5", "paceline.data.pack"),
    ("paceline.data.pack", "paceline.data.shards"),
    ("paceline.train.gradients", "paceline.train.step"),
    ("paceline.data.hdf5", "paceline.data.reading"),
    ("paceline.train.observers", "paceline.train.saving"),
}
"""Sibling folders that import each other both ways today; the list may only become shorter."""


def test_no_two_folders_import_each_other():
    modules = modules_in(SOURCE, "paceline")
    modules.pop("paceline", None)
    folders = {name: name.rpartition(".")[0] for name, path in modules.items()}
    folders |= {name: name for name, path in modules.items() if path.name == "__init__.py"}
    edges = {
        (folders[name], folders[other])
        for name, path in modules.items()
        for other in imported_modules(path, set(modules))
    }
    both = {(one, other) for one, other in edges if one < other and (other, one) in edges}
    siblings = {
        pair for pair in both if not any(b.startswith(f"{a}.") for a, b in (pair, pair[::-1]))
    }
    assert siblings == KNOWN_PAIRS, siblings ^ KNOWN_PAIRS


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
    assert not found, found


def test_the_reader_of_pickles_is_a_process_of_its_own():
    for path in MODULES:
        assert not imported_modules(path, {READS_A_PICKLE}), path


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
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if path.name != "detect.py":
            assert not re.search(
                r"environ(\.get)?[\[(][\"'](RANK|WORLD_SIZE|LOCAL_RANK|SLURM_(?!CONF)|OMPI_|PMI_)",
                text,
            ), path
