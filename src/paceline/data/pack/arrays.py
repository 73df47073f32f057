"""Pack rows of arrays: .npy, .npz, and the IDX files of MNIST."""

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
from paceline.data.pack.columns import (
    check_lengths,
    refuse_parts,
    select_columns,
    storable_dtype,
)
from paceline.data.pack.inputs import PackContext, Prepared
from paceline.data.pack.request import PackRequest
from paceline.data.shards.shard import Array, Rows
from paceline.errors import ConfigError, DataError

NPY, NPZ = ".npy", ".npz"
_PARTS = {"train": ("train",), "test": ("t10k", "test")}  # prefixes of the files of a split


@dataclass(frozen=True)
class Stored:
    """Where an array lies in a file, and its type and shape."""

    name: str
    path: str
    begin: int
    """Offset of its data in bytes."""
    dtype: str
    shape: tuple[int, ...]
    fortran: bool = False

    def rows(self, begin: int, end: int) -> Array:
        """Return some rows as a little-endian, C-ordered copy."""
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
        """The number of rows."""
        return self.stored[0].shape[0]

    def read(self, begin: int, end: int) -> Rows:
        """Return some rows of every array."""
        return {array.name: array.rows(begin, end) for array in self.stored}

    def tree(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for a worker process."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Arrays:
        """Rebuild the object from the dict of `tree`."""
        stored = (Stored(**fields | {"shape": tuple(fields["shape"])}) for fields in tree["stored"])
        return cls(tuple(stored))


def parse_input(argument: str) -> tuple[str, Path]:
    """Return column name and file of an argument NAME=FILE or FILE; the default name is that of the file.

    >>> parse_input("image=data/a.npy"), parse_input("data/a.npy")
    (('image', PosixPath('data/a.npy')), ('a', PosixPath('data/a.npy')))
    """
    name, equals, path = argument.partition("=")
    if equals and not Path(argument).exists():
        return name, Path(path)
    return Path(argument).stem, Path(argument)


def find_arrays(request: PackRequest) -> list[Path]:
    """Return the input files."""
    return [parse_input(argument)[1] for argument in request.inputs]


def prepare_arrays(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Return the arrays of .npy files, or of one .npz."""
    if files[0].suffix.lower() == NPZ:
        if len(files) > 1:
            raise ConfigError(
                f"{files[0]} has its own columns and cannot be combined",
                fix="pack one .npz at a time",
            )
        return _arrays(_members(files[0], context.spool), request.columns, str(files[0]))
    names = [parse_input(argument)[0] for argument in request.inputs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two columns are named {max(names, key=names.count)}", fix="rename them: NAME=FILE.npy"
        )
    stored = [_stored(name, path) for name, path in zip(names, files, strict=True)]
    # The order of the arguments is the order of the columns.
    return _arrays(stored, request.columns or names, ", ".join(map(str, files)))


def _arrays(stored: Sequence[Stored], wanted: Sequence[str], where: str) -> Prepared:
    by_name = {array.name: array for array in stored}
    if not wanted:
        refuse_parts(list(by_name), where)
    selected = [by_name[name] for name in select_columns(list(by_name), wanted, where)]
    for array in selected:
        path = where if where.lower().endswith(NPZ) else array.path
        if not array.shape:
            raise DataError(
                f"{path}: {array.name} is a scalar, not rows of samples",
                fix="select other columns with --columns",
            )
        storable_dtype(numpy.dtype(array.dtype), array.name, path)
    check_lengths({array.name: array.shape[0] for array in selected}, where)
    return Prepared(Arrays(tuple(selected)))


def _members(path: Path, spool: Path) -> list[Stored]:
    """Return the arrays of an .npz: in place if they are uncompressed, else unpacked into the spool folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(NPY)]
            return [
                _member(archive, path, info, spool / f"{number}.npy")
                for number, info in enumerate(members)
            ]
    # zipfile raises the last two for encrypted archives and unknown compression methods.
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise _unreadable(path, error) from error


def _member(
    archive: zipfile.ZipFile, path: Path, member: zipfile.ZipInfo, unpacked: Path
) -> Stored:
    name = member.filename.removesuffix(NPY)
    if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
        with path.open("rb") as file:
            file.seek(member.header_offset + 26)
            lengths = file.read(4)  # of the name and of the extra field, which precede the data
        name_length = int.from_bytes(lengths[:2], "little")
        extra_length = int.from_bytes(lengths[2:], "little")
        begin = member.header_offset + 30 + name_length + extra_length
        return _stored(name, path, begin)
    with archive.open(member) as packed, unpacked.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return _stored(name, unpacked, label=f"{path}[{name}]")


def _stored(name: str, path: Path, begin: int = 0, label: str = "") -> Stored:
    """Read the .npy header of an array."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            shape, fortran, dtype = _header(file)
            data, size = file.tell(), path.stat().st_size
    except (OSError, ValueError) as error:
        raise _unreadable(label or path, error) from error
    expected = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and size - data < expected:
        raise DataError(
            f"{label or path} is truncated: {name} needs {expected:,} bytes, {size - data:,} are left",
            fix="create or download the file again",
        )
    return Stored(name, str(path.absolute()), data, dtype.str, tuple(shape), fortran)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, numpy.dtype[Any]]:
    version = numpy.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"version {version} of the .npy format")
    if version == (1, 0):
        shape, fortran, dtype = numpy.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = numpy.lib.format.read_array_header_2_0(file)
    return shape, fortran, dtype


def _unreadable(where: Path | str, error: Exception) -> DataError:
    why = (isinstance(error, OSError) and error.strerror) or error
    return DataError(
        f"cannot read {where} as arrays: {why}",
        fix="check the path, or save it with numpy.save or numpy.savez",
    )


def has_idx(folder: Path) -> bool:
    """Return whether a folder contains IDX files named like those of MNIST."""
    return any(_idx_files(folder, part, "images", 3) for part in _PARTS)


def _idx_files(folder: Path, part: str, what: str, dimensions: int) -> list[Path]:
    suffixes = {"", ".gz", f".idx{dimensions}-ubyte"}
    files: list[Path] = []
    for prefix in _PARTS[part]:
        files += folder.glob(f"*{prefix}-{what}?idx{dimensions}-ubyte*")
    return sorted(path for path in files if path.suffix in suffixes)


def find_idx(request: PackRequest) -> list[Path]:
    """Return the files of images and labels of one MNIST split."""
    folder, part = Path(request.inputs[0]), request.part or "train"
    candidates = [_idx_files(folder, part, "images", 3), _idx_files(folder, part, "labels", 1)]
    for what, files in zip(("images", "labels"), candidates, strict=True):
        if len({path.name.removesuffix(".gz") for path in files}) != 1:
            count = f"several: {', '.join(path.name for path in files)}" if files else "none"
            raise DataError(
                f"{folder} must contain one file of {what} for --part {part}, found {count}",
                fix=f"add {_PARTS[part][0]}-{what}-idx{3 if what == 'images' else 1}-ubyte.gz, or choose another --part",
            )
    return [files[0] for files in candidates]


def prepare_idx(request: PackRequest, files: Sequence[Path], context: PackContext) -> Prepared:
    """Unpack one MNIST split; labels become int64, as PyTorch losses expect."""
    images, labels = (read_idx(path.parent, path.name.removesuffix(".gz")) for path in files)
    if labels.ndim != 1 or images.ndim != 3:
        raise DataError(
            f"{files[0].parent}: images of shape {images.shape} and labels of shape {labels.shape} are not MNIST",
            fix="download the files again",
        )
    check_lengths({"image": len(images), "label": len(labels)}, str(files[0].parent))
    numpy.save(context.spool / "image.npy", images)
    numpy.save(context.spool / "label.npy", labels.astype("<i8"))
    stored = [_stored(name, context.spool / f"{name}.npy") for name in ("image", "label")]
    return Prepared(Arrays(tuple(stored)))
