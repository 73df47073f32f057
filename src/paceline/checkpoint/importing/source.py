"""Find out what SOURCE is, and read it: a folder, a safetensors file, or a torch.save file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.importing.layouts import Contents, contents_of, state_dict_of
from paceline.checkpoint.importing.stored_tensor import StoredTensor, read_header
from paceline.checkpoint.importing.tree import read_torch_file
from paceline.errors import ConfigError, DataError
from paceline.safe_open import read_json

_LARGEST_JSON = 1 << 26

_WHOLE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_OPTIMIZERS = ("optimizer.bin", "optimizer.pt", "optimizer_1.bin")
_SCHEDULERS = ("scheduler.bin", "scheduler.pt", "scheduler_1.bin")
_TRAINER = "trainer_state.json"
_STATE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".safetensors"}
_NO_STATE = {"training_args.bin"}
_SAFETENSORS = ".safetensors"


def read_source(source: Path, scratch: Path, *, weights_only: bool, key: str = "") -> Contents:
    """Return what another program saved; `scratch` is a private folder for copies of tensors.

    `key` names the weights in a torch.save file that has others, too.
    """
    if "://" in str(source) or not source.exists():
        raise ConfigError(
            f"there is no file or folder {source}", fix="check the path, or copy it to this machine"
        )
    if key and (source.is_dir() or source.suffix in {_SAFETENSORS, ".json"}):
        raise ConfigError(
            f"--weights {key} is the key of a torch.save file, and {source} is none",
            fix="remove --weights, or name the file",
        )
    if source.is_dir():
        return _read_folder(source, scratch, weights_only=weights_only)
    if source.name == ".metadata":
        raise _is_dcp(source.parent)
    if source.name.endswith(f"{_SAFETENSORS}.index.json"):
        return Contents("sharded safetensors", read_shards(source), ordered=False)
    if source.suffix == _SAFETENSORS:
        return Contents("safetensors file", read_header(source), ordered=False)
    return contents_of(read_torch_file(source, scratch), source, key)


def _read_folder(folder: Path, scratch: Path, *, weights_only: bool) -> Contents:
    found = _read_weights(folder, scratch)
    if weights_only:
        return found
    files = [folder / name for name in _OPTIMIZERS if (folder / name).is_file()]
    optimizers = tuple(read_torch_file(file, scratch) for file in files)
    schedules = [folder / name for name in _SCHEDULERS if (folder / name).is_file()]
    schedulers = tuple(read_torch_file(file, scratch) for file in schedules)
    if (folder / _OPTIMIZERS[0]).is_file():
        found = found._replace(layout="Accelerate folder")
    step = _trainer_step(folder / _TRAINER)
    step_key = _TRAINER if step else ""
    read = {file.name for file in (*files, *schedules)} | found.files
    return found._replace(
        optimizers=optimizers,
        schedulers=schedulers,
        step=step,
        step_key=step_key,
        ignored=tuple(_others(folder, read)),
    )


def _others(folder: Path, read: frozenset[str] | set[str]) -> Iterator[str]:
    """Yield the files of a folder that may hold a state and were not read."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _STATE_SUFFIXES and path.name not in read | _NO_STATE:
            yield path.name


def _trainer_step(path: Path) -> int:
    """Return the step of a checkpoint of the Hugging Face Trainer; 0 for other folders."""
    try:
        step = read_json(path, _LARGEST_JSON, links=True)["global_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return step if type(step) is int and step > 0 else 0


def _read_weights(folder: Path, scratch: Path) -> Contents:
    if (folder / _WHOLE).is_file():
        weights = read_header(folder / _WHOLE)
        return Contents("Hugging Face folder", weights, ordered=False, files=frozenset({_WHOLE}))
    if (folder / _INDEX).is_file():
        weights = read_shards(folder / _INDEX)
        shards = frozenset(value.path.name for value in weights.values() if value.path is not None)
        return Contents("Hugging Face folder", weights, ordered=False, files=shards)
    pickled = folder / _PICKLED
    if pickled.is_file():
        weights = state_dict_of(read_torch_file(pickled, scratch), pickled)
        return Contents("Hugging Face folder", weights, files=frozenset({_PICKLED}))
    for path in (folder, *sorted(folder.iterdir())):
        if (path / ".metadata").is_file():
            raise _is_dcp(path)
    raise DataError(
        f"there are no weights in {folder}: no {_WHOLE}, {_INDEX} or {_PICKLED}",
        fix="name the file that holds them, or save them with model.save_pretrained(FOLDER)",
    )


def read_shards(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that an index names; raise if any of them is missing."""
    files = _weight_map(index)
    missing = sorted({file for file in files.values() if not (index.parent / file).is_file()})
    if missing:
        raise DataError(
            f"{index} names files that are missing: {', '.join(missing)}",
            fix="copy them into the same folder",
        )
    shards = {file: read_header(index.parent / file) for file in sorted(set(files.values()))}
    weights = {}
    for name, file in files.items():
        if name not in shards[file]:
            raise DataError(
                f"{index.parent / file} does not contain {name}, which {index.name} expects there",
                fix="copy all files again, from one version of the model",
            )
        weights[name] = shards[file][name]
    return weights


def _weight_map(index: Path) -> dict[str, str]:
    fix = "save the model again: model.save_pretrained(FOLDER)"
    try:
        tree: Any = read_json(index, _LARGEST_JSON, links=True)
        files = dict(tree["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"{index} is not an index of safetensors files ({type(error).__name__}: {error})"
        raise DataError(problem, fix=fix) from error
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(_SAFETENSORS):
            raise DataError(f"{index} names {file!r}, not a safetensors file beside it", fix=fix)
    return files


def _is_dcp(folder: Path) -> DataError:
    return DataError(
        f"{folder} is a distributed checkpoint (DCP); its .metadata is a pickle that may run any code",
        fix="if you trust it, convert it first: "
        f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pt",
    )
