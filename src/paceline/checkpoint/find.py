"""Find the checkpoints of a run by its folder, by one checkpoint, or by an address."""

from __future__ import annotations

import tomllib
from pathlib import Path

from paceline.checkpoint.catalog import Catalog, list_entries, reading
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.storage import Storage, step_of
from paceline.config.renamed import refuse_old_names
from paceline.config.schema import RunConfig
from paceline.config.values import from_toml, with_settings
from paceline.errors import ConfigError, did_you_mean
from paceline.rundir import RunDir
from paceline.safe_open import read_text
from paceline.terminal import plain


def open_storage(home: Path, to: str, name: str) -> Storage:
    """Return the storage of a run: its folder `home`, or a folder of its name under the path or address `to`."""
    if "://" in to:
        from paceline.checkpoint.remote_storage import RemoteStorage

        return RemoteStorage(f"{to.rstrip('/')}/{name}")
    return LocalStorage(Path(to) / name if to else home)


def located(run: str, runs: Path = Path("runs")) -> str:
    """Return the path of a run that was given by its name alone; any other path or address as it is."""
    inside = runs / run
    is_name = "/" not in run and not Path(run).exists() and inside.is_dir()
    return str(inside) if is_name else run


def find_catalog(run: str) -> Catalog:
    """Return the checkpoints of a run folder, a checkpoint folder, one checkpoint, or an address."""
    if "://" in run:
        return _at_address(run.rstrip("/"))
    path = Path(run) if Path(run).name not in {"", ".."} else Path(run).resolve()
    with reading(run):
        if not path.is_dir():
            raise _not_there(path)
        if RunDir(path).config.is_file():
            return _of_run(RunDir(path))
        if (step := step_of(path.name)) is not None:
            return Catalog(LocalStorage(path.parent), only=step)
        home = RunDir(path).checkpoints
        storage = LocalStorage(home if home.is_dir() else path)
        if (inside := runs_in(path)) and not any(list_entries(storage)):
            raise ConfigError(f"{run} is not a run", fix=f"use one of: {', '.join(inside)}")
        return Catalog(storage)


def _at_address(address: str) -> Catalog:
    from paceline.checkpoint.remote_storage import RemoteStorage

    above, _, name = address.rpartition("/")
    step = step_of(name)
    catalog = Catalog(RemoteStorage(address if step is None else above), only=step)
    if not any(list_entries(catalog.storage)):
        fix = "check the address: checkpoint.to of the run, then / and the name of the run"
        raise ConfigError(f"there is no checkpoint at {address}", fix=fix)
    return catalog


def _of_run(folder: RunDir) -> Catalog:
    """Return the checkpoints of a run, from the storage that its settings name."""
    try:
        settings = from_toml(tomllib.loads(read_text(folder.config)))
    except ValueError as error:
        raise ConfigError(
            f"{folder.config} is not TOML: {error}", fix=f"name {folder.checkpoints} itself"
        ) from error
    refuse_old_names(settings, str(folder.config), fix="rename it in that file, or start a new run")
    # Other settings may belong to the script, or to a later version.
    names = settings.keys() & {"name", "runs", "checkpoint.to", "checkpoint.best"}
    config = with_settings(RunConfig(), {name: settings[name] for name in names})
    to = config.checkpoint.to
    if "://" in to and not to.startswith("file://"):
        raise ConfigError(
            f"the checkpoints of {folder.root} are at {plain(to)}/{plain(config.name)}, by its config.toml",
            fix=f"if you trust that address, name it: `paceline ckpt list {plain(to.rstrip('/'))}/{plain(config.name)}`",
        )
    if to and "://" not in to:
        to = str(_started_in(folder, config) / to)
    return Catalog(open_storage(folder.checkpoints, to, config.name), config.checkpoint.best)


def _started_in(folder: RunDir, config: RunConfig) -> Path:
    """Return the working directory in which a run was started, to resolve its relative paths."""
    relative, root = RunDir.of(config).root, folder.root.absolute()
    if relative.is_absolute() or root.parts[-len(relative.parts) :] != relative.parts:
        return Path()
    start = root.parents[len(relative.parts) - 1]
    return Path() if start == Path.cwd() else start


def _not_there(path: Path) -> ConfigError:
    problem = f"there is no run {path}"
    if path.exists():
        return ConfigError(f"{path} is a file", fix=f"name the folder it is in: {path.parent}")
    near = {*runs_in(path.parent), *runs_in(Path("runs"))}
    if path.parent == Path():
        near = {Path(run).name for run in near}
    return ConfigError(
        problem, fix=did_you_mean(str(path), near) if near else "check the path, or give an address"
    )


def runs_in(folder: Path) -> list[str]:
    """Return the paths in a folder that look like runs or checkpoints."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        str(path)
        for path in inside
        if RunDir(path).config.is_file()
        or RunDir(path).checkpoints.is_dir()
        or step_of(path.name) is not None
    ]
