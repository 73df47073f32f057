"""How do the same records lie in the format of each contender?

Run by data.py as `data_formats.py FORMAT FOLDER RECORDS SIDE`, in a process of its own. A record is an image of SIDE x SIDE bytes,
which are random but for the first eight, and a label: the number of the record, which is also what those eight say. So
whoever reads can tell that each record came once, and whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
from data_task import import_streaming

SHARDS = 16
"""Files, for the formats that are read in shards and do not choose a size themselves."""
MANY = 64
"""Shards of the set that Paceline shuffles in windows: four times as many as a window has."""
CHUNK_BYTES = 1 << 20


def write_arrays(folder: Path, records: int, side: int) -> None:
    """Write what all other sets are made from: two arrays."""
    random = numpy.random.default_rng(1)
    images = random.integers(0, 256, (records, side, side), dtype=numpy.uint8)
    labels = numpy.arange(records, dtype=numpy.int64)
    images.reshape(records, -1)[:, :8] = labels[:, None].view(numpy.uint8)
    numpy.save(folder / "images.npy", images)
    numpy.save(folder / "labels.npy", labels)


def write_shards(folder: Path, images: Any, labels: Any, each: int = 0) -> None:
    """Write Paceline's shards, of the size that its packer would choose."""
    from paceline.data.pack.request import SHARD_BYTES
    from paceline.data.shards.index import INDEX, DatasetIndex
    from paceline.data.shards.shard import column_of, write_shard
    from paceline.rundir import write_whole

    each = each or SHARD_BYTES // (images[0].nbytes + 8)
    columns = column_of("image", images), column_of("label", labels)
    facts = [
        write_shard(
            folder,
            f"{number:05d}.safetensors",
            columns,
            {"image": images[span], "label": labels[span]},
        )
        for number, span in enumerate(spans(len(labels), each))
    ]
    write_whole(folder / INDEX, DatasetIndex(columns, each, tuple(facts)).to_json())


def write_many_shards(folder: Path, images: Any, labels: Any) -> None:
    """Write so many shards that they are shuffled in windows."""
    write_shards(folder, images, labels, each=-(-len(labels) // MANY))


def write_hdf5(folder: Path, images: Any, labels: Any, *, chunked: bool) -> None:
    """Write an HDF5 file: contiguous, which suits who reads single samples, or in chunks."""
    import h5py

    rows = chunk_rows(images) if chunked else 0
    with h5py.File(folder / "set.h5", "w") as file:
        file.create_dataset(
            "image", data=images, chunks=(rows, *images.shape[1:]) if chunked else None
        )
        file.create_dataset("label", data=labels, chunks=(rows,) if chunked else None)


def chunk_rows(images: Any) -> int:
    """Return how many records make a chunk of about 1 MB."""
    return max(1, CHUNK_BYTES // images[0].nbytes)


def write_arrow(folder: Path, images: Any, labels: Any) -> None:
    """Write the Arrow files of HF datasets; a flat list of fixed length is read seven times as fast as its Array2D."""
    import pyarrow
    from datasets import Dataset

    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(images.reshape(-1)), images[0].size)
    table = pyarrow.table({"image": flat, "label": labels})
    Dataset(table).save_to_disk(folder / "set", num_shards=min(SHARDS, len(labels)))


def write_array_record(folder: Path, images: Any, labels: Any) -> None:
    """Write ArrayRecord files, in groups of one, as random reading wants it."""
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, span in enumerate(spans(len(labels), -(-len(labels) // SHARDS))):
        writer = ArrayRecordWriter(str(folder / f"{number:05d}.array_record"), "group_size:1")
        for image, label in zip(images[span], labels[span], strict=True):
            writer.write(label.tobytes() + image.tobytes())
        writer.close()


def write_mds(folder: Path, images: Any, labels: Any) -> None:
    """Write the shards of MosaicML streaming, raw arrays, no compression."""
    side = images.shape[1]
    columns = {"image": f"ndarray:uint8:{side},{side}", "label": "int"}
    with import_streaming().MDSWriter(out=str(folder / "set"), columns=columns) as writer:
        for image, label in zip(images, labels, strict=True):
            writer.write({"image": numpy.ascontiguousarray(image), "label": int(label)})


def write_tar(folder: Path, images: Any, labels: Any) -> None:
    """Write the tar files of webdataset, raw bytes."""
    import webdataset

    for number, span in enumerate(spans(len(labels), -(-len(labels) // SHARDS))):
        with webdataset.TarWriter(str(folder / f"{number:05d}.tar"), mtime=0) as writer:
            for image, label in zip(images[span], labels[span], strict=True):
                content = {
                    "__key__": f"{label:09d}",
                    "image.bin": image.tobytes(),
                    "label.bin": label.tobytes(),
                }
                writer.write(content)


def write_litdata(folder: Path, images: Any, labels: Any) -> None:
    """Write the chunks of litdata, of the size that its guide chooses."""
    from functools import partial

    from litdata import optimize

    optimize(
        fn=partial(_record, str(folder.parent / "arrays")),
        inputs=list(range(len(labels))),
        output_dir=str(folder / "set"),
        chunk_bytes="64MB",
        num_workers=1,
    )


def _record(arrays: str, number: int) -> dict[str, Any]:
    import torch

    if arrays not in _LOADED:
        _LOADED[arrays] = load_arrays(Path(arrays))
    images, labels = _LOADED[arrays]
    return {"image": torch.from_numpy(images[number].copy()), "label": int(labels[number])}


_LOADED: dict[str, tuple[Any, Any]] = {}


def load_arrays(folder: Path) -> tuple[Any, Any]:
    """Map the two arrays; as plain arrays, which are indexed with less ado than numpy's memmap."""
    images, labels = (
        numpy.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")
    )
    return numpy.asarray(images), numpy.asarray(labels)


def spans(count: int, each: int) -> Iterator[slice]:
    """Cut a number of records into pieces.

    >>> list(spans(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(begin, min(begin + each, count)) for begin in range(0, count, each))


WRITERS: dict[str, Callable[[Path, Any, Any], None]] = {
    "shards": write_shards,
    "many-shards": write_many_shards,
    "hdf5": lambda folder, images, labels: write_hdf5(folder, images, labels, chunked=False),
    "hdf5-chunked": lambda folder, images, labels: write_hdf5(folder, images, labels, chunked=True),
    "arrow": write_arrow,
    "array-record": write_array_record,
    "mds": write_mds,
    "tar": write_tar,
    "litdata": write_litdata,
}


def main(name: str, root: Path, records: int, side: int) -> None:
    """Write one set into a folder of its own."""
    folder = root / name
    folder.mkdir(mode=0o700)
    if name == "arrays":
        write_arrays(folder, records, side)
    else:
        WRITERS[name](folder, *load_arrays(root / "arrays"))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
