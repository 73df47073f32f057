"""Make a checkpoint of a run from the weights and the optimizer state that another program saved."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.catalog import reading
from paceline.checkpoint.find import find_catalog
from paceline.checkpoint.importing.layouts import Contents
from paceline.checkpoint.importing.optimizer_state import OptimizerState, read_optimizers
from paceline.checkpoint.importing.source import read_source
from paceline.checkpoint.importing.stored_tensor import StoredTensor
from paceline.checkpoint.importing.tree import NotPlain, plain_json
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
    weights: str = ""
    """Key of the weights in a torch.save file; empty: the usual ones."""


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
    schedulers: SchedulerState
    epochs: int
    """Complete epochs, which the run turns into steps; 0 if the step is known."""
    ignored: tuple[str, ...]
    """Keys or files that nothing was imported from."""
    size_bytes: int


class SchedulerState(NamedTuple):
    """The state of the schedulers as JSON, or why it is left out."""

    states: tuple[Any, ...] = ()
    last_epoch: int = 0
    """How often the first was stepped."""
    left_out: str = ""


def import_run(plan: ImportPlan) -> Imported:
    """Import into a run that has no checkpoints yet."""
    storage = _storage(plan.run)
    _refuse_checkpoints(storage, plan.run)
    with _scratch(plan.run) as scratch:
        with reading(str(plan.source)):
            contents = read_source(
                plan.source, scratch, weights_only=plan.weights_only, key=plan.weights
            )
        with _writing(plan.run):
            _refuse_checkpoints(storage, plan.run)
            return _import(plan, contents, storage)


def _import(plan: ImportPlan, contents: Contents, storage: Storage) -> Imported:
    contents = contents._replace(weights=_without_average_count(contents.weights))
    prefix = _prefix(plan.prefix, contents)
    weights = {name.removeprefix(prefix): value for name, value in contents.weights.items()}
    if plan.weights_only:
        contents = contents._replace(
            optimizers=(), schedulers=(), step=0, step_key="", epochs=0, left_out=""
        )
    if contents.left_out:
        optimizer = OptimizerState(left_out=contents.left_out)
    else:
        optimizer = read_optimizers(contents.optimizers, weights, prefix)
    schedulers = _read_schedulers(contents.schedulers)
    step, step_key, epochs = contents.step, contents.step_key, contents.epochs
    if not step_key and optimizer.updates:
        step, step_key = optimizer.updates, "the number of updates in the optimizer state"
    if plan.step is not None:
        step, step_key, epochs = plan.step, "", 0
    tensors = {f"model.{name}": value for name, value in weights.items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.tensors.items()}
    facts = {
        "layout": contents.layout,
        "optimizer_state": list(optimizer.kinds),
        "places": optimizer.places,
        "order": list(weights) if contents.ordered else [],
        "groups": optimizer.groups,
        "schedulers": schedulers.states,
        "epochs": epochs,
    }
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
        schedulers=schedulers,
        epochs=epochs,
        ignored=() if plan.weights_only else contents.ignored,
        size_bytes=manifest.size_bytes,
    )


def _without_average_count(weights: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Remove the count of torch's AveragedModel (SWA, EMA), which is not a part of the model that it averages."""
    rest = {name: value for name, value in weights.items() if name != "n_averaged"}
    return rest if all(name.startswith("module.") for name in rest) else weights


def _read_schedulers(saved: tuple[Any, ...]) -> SchedulerState:
    try:
        states = tuple(plain_json(each) for each in saved)
    except NotPlain as reason:
        return SchedulerState(left_out=str(reason))
    if not all(
        isinstance(each, dict) and isinstance(each.get("last_epoch"), int) for each in saved
    ):
        return SchedulerState(left_out="it is not what scheduler.state_dict() returns")
    return SchedulerState(states, saved[0]["last_epoch"] if saved else 0)


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
