"""Make a checkpoint of a run from the weights and the optimizer state that another program saved."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.catalog import reading
from paceline.checkpoint.find import find_catalog
from paceline.checkpoint.importing.layouts import Contents
from paceline.checkpoint.importing.optimizer_state import OptimizerState, name_state
from paceline.checkpoint.importing.source import read_source
from paceline.checkpoint.importing.weight_names import (
    LIGHTNING,
    WRAPPERS,
    common_prefix,
    refuse_prefix,
)
from paceline.checkpoint.importing.write import write_checkpoint
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.storage import Storage, step_of
from paceline.errors import ConfigError
from paceline.rundir import RunDir, make_private, writing_to
from paceline.runlock import claimed


class ImportPlan(NamedTuple):
    """What to import, and how."""

    source: Path
    run: str
    prefix: str = "auto"
    """Prefix to remove from the names; auto, or none."""
    step: int | None = None
    weights_only: bool = False


class Imported(NamedTuple):
    """The checkpoint that an import wrote."""

    layout: str
    where: str
    step: int
    step_key: str
    """Where the step was found; empty if the file has none, or if it was not used."""
    weights: int
    prefix: str
    """The prefix that was removed from the names of the weights."""
    optimizer: OptimizerState
    size_bytes: int


def import_run(plan: ImportPlan) -> Imported:
    """Import into a run that has no checkpoints yet."""
    storage = _storage(plan.run)
    _refuse_checkpoints(storage, plan.run)
    with _scratch(plan.run) as scratch:
        with reading(str(plan.source)):
            contents = read_source(plan.source, scratch, weights_only=plan.weights_only)
        with _writing(plan.run):
            _refuse_checkpoints(storage, plan.run)
            return _import(plan, contents, storage)


def _import(plan: ImportPlan, contents: Contents, storage: Storage) -> Imported:
    prefix = _prefix(plan.prefix, contents)
    weights = {name.removeprefix(prefix): value for name, value in contents.weights.items()}
    saved = () if plan.weights_only else contents.optimizers
    optimizer = name_state(saved, weights, ordered=contents.ordered)
    step, step_key = (0, "") if plan.weights_only else (contents.step, contents.step_key)
    if plan.step is not None:
        step, step_key = plan.step, ""
    tensors = {f"model.{name}": value for name, value in weights.items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors.items()}
    facts = {"layout": contents.layout, "optimizer_state": list(optimizer.kinds)}
    numbers = {f"optimizer.{name}": kind for name, kind in optimizer.numbers.items()}
    manifest = write_checkpoint(storage, step, tensors, {"imported": facts, "numbers": numbers})
    return Imported(
        layout=contents.layout,
        where=storage.where(step),
        step=step,
        step_key=step_key,
        weights=len(weights),
        prefix=prefix,
        optimizer=optimizer,
        size_bytes=manifest.size_bytes,
    )


def _prefix(wanted: str, contents: Contents) -> str:
    if wanted == "none":
        return ""
    if wanted != "auto":
        refuse_prefix(wanted, contents.weights)
        return wanted
    is_lightning = contents.layout.startswith("Lightning")
    wrappers = (*WRAPPERS, LIGHTNING) if is_lightning else WRAPPERS
    return common_prefix(contents.weights, wrappers)


def _storage(run: str) -> Storage:
    """Return the place of the checkpoints of a run that may not exist yet."""
    if "://" in run:
        from paceline.checkpoint.remote_storage import RemoteStorage

        return RemoteStorage(run.rstrip("/"))
    folder = RunDir(Path(run))
    if folder.config.is_file():
        return find_catalog(run).storage
    home = folder.checkpoints
    if step_of(folder.root.name) is not None or folder.root.name == home.name:
        raise ConfigError(f"{run} is not the folder of a run", fix="name it, such as runs/NAME")
    return LocalStorage(home)


def _refuse_checkpoints(storage: Storage, run: str) -> None:
    steps = storage.steps()
    if steps:
        raise ConfigError(
            f"{run} has checkpoints already; the newest is of step {steps[0]}",
            fix="import into a new run: give another name",
        )


@contextlib.contextmanager
def _scratch(run: str) -> Iterator[Path]:
    """Make a private temporary folder, on the file system of the run, which has space for it."""
    parents = [Path(tempfile.gettempdir())]
    if "://" not in run:
        parents = [folder for folder in Path(run).absolute().parents if folder.is_dir()]
    with writing_to(parents[0], "import into another folder"):
        folder = tempfile.TemporaryDirectory(prefix=".paceline-import-", dir=parents[0])
    with folder:
        yield Path(folder.name)


@contextlib.contextmanager
def _writing(run: str) -> Iterator[None]:
    """Hold the lock of the run, so that no training starts meanwhile."""
    if "://" in run:
        yield
        return
    folder = RunDir(Path(run))
    with writing_to(folder.root):
        make_private(folder.root)
    with claimed(folder.lock):
        yield
