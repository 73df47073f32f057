"""The kinds of input that can be packed, and how the kind of an input is detected."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.pack import arrays, csvfile, hdf5, images, tables, text, text_tasks
from paceline.data.pack.arrays import Arrays, parse_input
from paceline.data.pack.hdf5 import Hdf5
from paceline.data.pack.images import Images
from paceline.data.pack.inputs import Input, PackContext, Prepared
from paceline.data.pack.request import FLAGS, PackRequest
from paceline.data.pack.stream import Stream
from paceline.data.pack.tables import Table
from paceline.errors import ConfigError, DataError

_TEXT_OPTIONS = {"text", "tokenizer", "train_tokenizer"}


class Kind(NamedTuple):
    """A kind of input."""

    looks: str
    """Example for messages."""
    suffixes: tuple[str, ...]
    options: frozenset[str]
    """Options that apply to it."""
    find: Callable[[PackRequest], list[Path]]
    """Returns its files."""
    prepare: Callable[[PackRequest, Sequence[Path], PackContext], Prepared]


def _files(request: PackRequest, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the input files, and the matching files of input folders."""
    files: list[Path] = []
    for path in map(Path, request.inputs):
        if path.is_dir():
            files += (inner for inner in sorted(path.iterdir()) if inner.suffix.lower() in suffixes)
        else:
            files.append(path)
    return files


def _kind(
    looks: str, suffixes: tuple[str, ...], options: set[str], prepare: Any, find: Any = None
) -> Kind:
    return Kind(
        looks,
        suffixes,
        frozenset(options),
        find or (lambda request: _files(request, suffixes)),
        prepare,
    )


KINDS = {
    "arrays": _kind(
        "x.npy, x.npz, or image=a.npy label=b.npy",
        (arrays.NPY, arrays.NPZ),
        {"columns"},
        arrays.prepare_arrays,
        arrays.find_arrays,
    ),
    "HDF5": _kind("x.h5", hdf5.SUFFIXES, {"columns", "flatten"}, hdf5.prepare_hdf5),
    "CSV": _kind("x.csv", csvfile.SUFFIXES, {"columns"}, csvfile.prepare_csv),
    "Parquet": _kind("x.parquet", tables.PARQUET, {"columns"}, tables.prepare_parquet),
    "text": _kind(
        "x.txt, or any file or folder with --as bytes, characters or tokens",
        text_tasks.SUFFIXES,
        {"length"} | _TEXT_OPTIONS,
        text.prepare_text,
        text_tasks.find_texts,
    ),
    "MNIST": _kind(
        "a folder with train-images-idx3-ubyte.gz and its siblings", (), {"part"}, arrays.prepare_idx, arrays.find_idx
    ),
    "images": _kind(
        "a folder of CLASS/x.png", (), {"size", "grey"}, images.prepare_images, images.find_images
    ),
}  # fmt: skip

_INPUTS: dict[str, Any] = {kind.__name__: kind for kind in (Arrays, Hdf5, Images, Stream, Table)}


def tree_of(given: Input) -> dict[str, Any]:
    """Return a JSON-serializable dict of an input."""
    return {"input": type(given).__name__} | given.tree()


def input_from(tree: dict[str, Any]) -> Input:
    """Rebuild an input from the dict of `tree_of`."""
    fields = dict(tree)
    kind = _INPUTS[fields.pop("input")]
    rebuilt: Input = kind.from_tree(fields)
    return rebuilt


def kind_of(request: PackRequest) -> Kind:
    """Return the kind of an input; raise if it does not exist or an option does not apply to it."""
    for argument in request.inputs:
        _check_exists(parse_input(argument)[1])
    name = _name(request)
    for option in request.asked:
        if option not in KINDS[name].options:
            accepted = ", ".join(FLAGS[field] for field in FLAGS if field in KINDS[name].options)
            raise ConfigError(
                f"{FLAGS[option]} does not apply to {name}",
                fix=f"remove it; {name} accepts {accepted}",
            )
    return KINDS[name]


def _check_exists(path: Path) -> None:
    if path.exists():
        return
    folder = path.parent
    siblings = [sibling.name for sibling in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    raise DataError(
        f"there is no {path}",
        fix=f"did you mean {path.with_name(near[0])}?" if near else "check the path",
    )


def _name(request: PackRequest) -> str:
    if _TEXT_OPTIONS.intersection(request.asked):
        return "text"
    names = {_name_of(parse_input(argument)[1]) for argument in request.inputs}
    if len(names) > 1:
        raise ConfigError(
            f"the inputs are of several kinds: {', '.join(sorted(names))}",
            fix="pack them separately",
        )
    name = names.pop()
    if len(request.inputs) > 1 and name in {"MNIST", "images", "HDF5"}:
        raise ConfigError(
            f"{name} takes one input, got {len(request.inputs)}", fix="pack them separately"
        )
    return name


def _name_of(path: Path) -> str:
    """Return the kind of a file by its suffix, of a folder by its content."""
    if path.is_dir():
        detected = _name_of_folder(path)
    else:
        suffix = path.suffix.lower()
        detected = next((name for name, kind in KINDS.items() if suffix in kind.suffixes), "")
    if detected:
        return detected
    known = "".join(f"\n    {name}: {kind.looks}" for name, kind in KINDS.items())
    raise ConfigError(f"cannot pack {path}{_hint(path)}", fix=f"use one of these inputs:{known}")


def _name_of_folder(folder: Path) -> str:
    if arrays.has_idx(folder):
        return "MNIST"
    for name in ("Parquet", "CSV"):
        if any(path.suffix.lower() in KINDS[name].suffixes for path in folder.iterdir()):
            return name
    if images.has_classes(folder):
        return "images"
    return "text" if text_tasks.has_texts(folder) else ""


def _hint(path: Path) -> str:
    if not path.is_dir():
        return ""
    if not any(path.iterdir()):
        return ": the folder is empty"
    pictures = any(inner.suffix.lower() in images.SUFFIXES for inner in path.iterdir())
    return ": its images are not in class folders" if pictures else ""
