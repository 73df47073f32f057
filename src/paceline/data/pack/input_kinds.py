"""Which inputs there are, and of which kind one is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.pack import arrays, csvfile, hdf5, images, tables, text
from paceline.data.pack import text_tasks as pieces
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
    """How a person names one."""
    suffixes: tuple[str, ...]
    options: frozenset[str]
    """What may be asked of it."""
    find: Callable[[PackRequest], list[Path]]
    """Finds the files that it is made of."""
    prepare: Callable[[PackRequest, Sequence[Path], PackContext], Prepared]


def _files(request: PackRequest, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that are named, and those of named folders."""
    found: list[Path] = []
    for word in request.words:
        path = Path(word)
        inner = (
            (one for one in sorted(path.iterdir()) if one.suffix.lower() in suffixes)
            if path.is_dir()
            else [path]
        )
        found += inner
    return found


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
    "HDF5": _kind("x.h5", hdf5.SUFFIXES, {"columns"}, hdf5.prepare_hdf5),
    "CSV": _kind("x.csv", csvfile.SUFFIXES, {"columns"}, csvfile.prepare_csv),
    "Parquet": _kind("x.parquet", tables.PARQUET, {"columns"}, tables.prepare_parquet),
    "text": _kind(
        "x.txt, or any file or folder with --as bytes, characters or tokens",
        pieces.SUFFIXES,
        {"length"} | _TEXT_OPTIONS,
        text.prepare_text,
        pieces.find_texts,
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
    """Return an input as JSON can say it."""
    return {"input": type(given).__name__} | given.tree()


def input_from(tree: dict[str, Any]) -> Input:
    """Return the input that `tree_of` spoke of."""
    found: Input = _INPUTS[tree["input"]].from_tree(
        {name: value for name, value in tree.items() if name != "input"}
    )
    return found


def kind_of(request: PackRequest) -> Kind:
    """Return the kind of an input, if it is there and heeds the options."""
    for word in request.words:
        _check_there(parse_input(word)[1])
    name = _name(request)
    for option in request.asked:
        if option not in KINDS[name].options:
            heeded = ", ".join(FLAGS[one] for one in FLAGS if one in KINDS[name].options)
            raise ConfigError(
                f"{FLAGS[option]} means nothing for {name}",
                fix=f"leave it out; {name} heeds {heeded}",
            )
    return KINDS[name]


def _check_there(path: Path) -> None:
    if path.exists():
        return
    siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    raise DataError(
        f"there is no {path}",
        fix=f"did you mean {path.with_name(near[0])}?" if near else "check the path",
    )


def _name(request: PackRequest) -> str:
    if _TEXT_OPTIONS.intersection(request.asked):
        return "text"
    names = {_name_of(parse_input(word)[1]) for word in request.words}
    if len(names) > 1:
        raise ConfigError(
            f"inputs of several kinds: {', '.join(sorted(names))}", fix="pack them one by one"
        )
    name = names.pop()
    if len(request.words) > 1 and name in {"MNIST", "images", "HDF5"}:
        raise ConfigError(
            f"{name} is packed from one place, not {len(request.words)}", fix="pack them one by one"
        )
    return name


def _name_of(path: Path) -> str:
    """Return the kind of a file, by its ending, or of a folder, by what is in it."""
    if path.is_dir():
        found = _name_of_folder(path)
    else:
        ending = path.suffix.lower()
        found = next((name for name, kind in KINDS.items() if ending in kind.suffixes), "")
    if found:
        return found
    known = "".join(f"\n    {name}: {kind.looks}" for name, kind in KINDS.items())
    raise ConfigError(
        f"{path} is nothing that can be packed{_hint(path)}", fix=f"name one of these:{known}"
    )


def _name_of_folder(folder: Path) -> str:
    if arrays.has_idx(folder):
        return "MNIST"
    for name in ("Parquet", "CSV"):
        if any(path.suffix.lower() in KINDS[name].suffixes for path in folder.iterdir()):
            return name
    if images.has_classes(folder):
        return "images"
    return "text" if pieces.has_texts(folder) else ""


def _hint(path: Path) -> str:
    if not path.is_dir():
        return ""
    if not any(path.iterdir()):
        return ": it is an empty folder"
    pictures = any(one.suffix.lower() in images.SUFFIXES for one in path.iterdir())
    return ": its images are in no folder of a class" if pictures else ""
