"""Samples that are rows of arrays: .npy, .npz, and the IDX files of MNIST."""

from __future__ import annotations

import math
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy

from paceline.data.mnist_idx import read_idx
from paceline.data.pack.columns import check_lengths, select_columns, storable_dtype
from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.request import PackRequest
from paceline.data.shards.shard import Array, Rows
from paceline.errors import ConfigError, DataError

NPY, NPZ = ".npy", ".npz"
_PARTS = {"train": ("train",), "test": ("t10k", "test")}  # the words by which files of a part begin


@dataclass(frozen=True)
class Stored:
    """An array as it lies in a file."""

    name: str
    path: str
    begin: int
    """The first byte of its numbers."""
    dtype: str
    shape: tuple[int, ...]
    fortran: bool = False

    def rows(self, begin: int, end: int) -> Array:
        """Return some rows, little end first."""
        dtype = numpy.dtype(self.dtype)
        if not math.prod(self.shape):
            return numpy.empty((end - begin, *self.shape[1:]), dtype=dtype.newbyteorder("<"))
        order = "F" if self.fortran else "C"
        whole: Array = numpy.memmap(self.path, dtype, "r", self.begin, self.shape, order)  # type: ignore[call-overload]
        return numpy.array(whole[begin:end], dtype=dtype.newbyteorder("<"), order="C")


@dataclass(frozen=True)
class Arrays:
    """Arrays of equal length, each a column."""

    stored: tuple[Stored, ...]

    @property
    def samples(self) -> int:
        """How many rows there are."""
        return self.stored[0].shape[0]

    def read(self, begin: int, end: int) -> Rows:
        """Return some rows of every array."""
        return {one.name: one.rows(begin, end) for one in self.stored}

    def tree(self) -> dict[str, Any]:
        """Return this as JSON can say it."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Arrays:
        """Return what `tree` said."""
        return cls(tuple(Stored(**one | {"shape": tuple(one["shape"])}) for one in tree["stored"]))


def parse_input(word: str) -> tuple[str, Path]:
    """Return the name of a column and its file; a name that is not given is the file's.

    >>> parse_input("image=data/a.npy"), parse_input("data/a.npy")
    (('image', PosixPath('data/a.npy')), ('a', PosixPath('data/a.npy')))
    """
    name, equals, path = word.partition("=")
    return (
        (name, Path(path)) if equals and not Path(word).exists() else (Path(word).stem, Path(word))
    )


def find_arrays(request: PackRequest) -> list[Path]:
    """Return the files that are named."""
    return [parse_input(word)[1] for word in request.words]


def prepare_arrays(request: PackRequest, files: Sequence[Path], shop: PackContext) -> Prepared:
    """Return the arrays of some .npy files, or of one .npz."""
    if files[0].suffix.lower() == NPZ:
        if len(files) > 1:
            raise ConfigError(
                f"{files[0]} is a set of columns of its own", fix="pack one .npz at a time"
            )
        return _arrays(_members(files[0], shop.spool), request.columns, str(files[0]))
    names = [parse_input(word)[0] for word in request.words]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two columns are called {max(names, key=names.count)}", fix="name them: NAME=FILE.npy"
        )
    found = [_stored(name, path) for name, path in zip(names, files, strict=True)]
    # Whoever lists files has said the order.
    return _arrays(found, request.columns or names, ", ".join(map(str, files)))


def _arrays(found: Sequence[Stored], wanted: Sequence[str], where: str) -> Prepared:
    by_name = {one.name: one for one in found}
    taken = [by_name[name] for name in select_columns(list(by_name), wanted, where)]
    for one in taken:
        said = where if where.lower().endswith(NPZ) else one.path
        if not one.shape:
            raise DataError(
                f"{said}: {one.name} is one number, not rows of samples",
                fix="leave it out: --columns",
            )
        storable_dtype(numpy.dtype(one.dtype), one.name, said)
    check_lengths({one.name: one.shape[0] for one in taken}, where)
    return Prepared(Arrays(tuple(taken)))


def _members(path: Path, spool: Path) -> list[Stored]:
    """Return the arrays of an .npz: in place where they lie as they are, else unpacked beside the set."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if one.filename.endswith(NPY)]
            return [
                _member(archive, path, one, spool / f"{number}.npy")
                for number, one in enumerate(members)
            ]
    # The last two are zipfile's words for an archive that is encrypted, or packed in a way it does not know.
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise _unreadable(path, error) from error


def _member(
    archive: zipfile.ZipFile, path: Path, member: zipfile.ZipInfo, unpacked: Path
) -> Stored:
    name = member.filename.removesuffix(NPY)
    if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
        with path.open("rb") as file:
            file.seek(member.header_offset + 26)
            lengths = file.read(4)  # of the name and of the extra field, which come before the data
        begin = (
            member.header_offset
            + 30
            + int.from_bytes(lengths[:2], "little")
            + int.from_bytes(lengths[2:], "little")
        )
        return _stored(name, path, begin)
    with archive.open(member) as packed, unpacked.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return _stored(name, unpacked, said=f"{path}[{name}]")


def _stored(name: str, path: Path, begin: int = 0, said: str = "") -> Stored:
    """Read where the numbers of an array in the .npy format are."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            shape, fortran, dtype = _header(file)
            data, size = file.tell(), path.stat().st_size
    except (OSError, ValueError) as error:
        raise _unreadable(said or path, error) from error
    if not dtype.hasobject and size - data < math.prod(shape) * dtype.itemsize:
        raise DataError(
            f"{said or path} is truncated: {name} should have {math.prod(shape) * dtype.itemsize:,} bytes, and {size - data:,} are left",
            fix="make or fetch that file again",
        )
    return Stored(name, str(path.absolute()), data, dtype.str, tuple(shape), fortran)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, numpy.dtype[Any]]:
    version = numpy.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"version {version} of the .npy format")
    read = (
        numpy.lib.format.read_array_header_1_0
        if version == (1, 0)
        else numpy.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype


def _unreadable(where: Path | str, error: Exception) -> DataError:
    why = (isinstance(error, OSError) and error.strerror) or error
    return DataError(
        f"cannot read {where} as arrays: {why}",
        fix="check the path, or save it with numpy.save or savez",
    )


def has_idx(folder: Path) -> bool:
    """Return whether a folder holds the files of MNIST, or ones that are named like them."""
    return any(_idx_files(folder, part, "images", 3) for part in _PARTS)


def _idx_files(folder: Path, part: str, what: str, dimensions: int) -> list[Path]:
    found = [
        path
        for word in _PARTS[part]
        for path in folder.glob(f"*{word}-{what}?idx{dimensions}-ubyte*")
    ]
    return sorted(path for path in found if path.suffix in {"", ".gz", f".idx{dimensions}-ubyte"})


def find_idx(request: PackRequest) -> list[Path]:
    """Return the images and the labels of a part of MNIST."""
    folder, part = Path(request.words[0]), request.part or "train"
    found = [_idx_files(folder, part, "images", 3), _idx_files(folder, part, "labels", 1)]
    for what, files in zip(("images", "labels"), found, strict=True):
        if len({path.name.removesuffix(".gz") for path in files}) != 1:
            said = f"has several: {', '.join(path.name for path in files)}" if files else "has none"
            raise DataError(
                f"{folder} should have one file of the {what} of part {part}, and {said}",
                fix=f"put {_PARTS[part][0]}-{what}-idx{3 if what == 'images' else 1}-ubyte.gz there, or choose another --part",
            )
    return [files[0] for files in found]


def prepare_idx(request: PackRequest, files: Sequence[Path], shop: PackContext) -> Prepared:
    """Unpack a part of MNIST; labels become int64, as losses want them."""
    images, labels = (read_idx(path.parent, path.name.removesuffix(".gz")) for path in files)
    if labels.ndim != 1 or images.ndim != 3:
        raise DataError(
            f"{files[0].parent}: images {images.shape} and labels {labels.shape} are not those of MNIST",
            fix="fetch the files again",
        )
    check_lengths({"image": len(images), "label": len(labels)}, str(files[0].parent))
    numpy.save(shop.spool / "image.npy", images)
    numpy.save(shop.spool / "label.npy", labels.astype("<i8"))
    return Prepared(
        Arrays(tuple(_stored(name, shop.spool / f"{name}.npy") for name in ("image", "label")))
    )
