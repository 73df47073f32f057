"""Small real files of every kind that can be packed, with what must come out of them."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy
import pyarrow
import pyarrow.parquet
from PIL import Image
from safetensors.numpy import load_file

from paceline.data.pack import PackRequest
from paceline.data.shards.index import INDEX, OFFSETS, DatasetIndex

IMAGES = numpy.arange(20 * 5 * 4, dtype="uint8").reshape(20, 5, 4)
LABELS = numpy.arange(20, dtype="int64") % 3
WORDS = ["", "a", "bé", "ccc", "\N{SNOWMAN}"] * 4
TEXTS = {
    "a.txt": "To be, or not to be.\nThat is the question.\n",
    "b/c.txt": "é\n",
    "d.txt": "  Words, words, words.\n" * 9,
}
JOINED = "".join(TEXTS.values())


class Example(NamedTuple):
    """An input, its columns in order, and what the index says of it."""

    request: PackRequest
    columns: dict[str, Any]
    """Arrays; a list of values where lengths vary."""
    about: dict[str, Any] = {}  # noqa: RUF012


def npy(folder: Path) -> Example:
    numpy.save(folder / "x.npy", IMAGES)
    return Example(PackRequest((str(folder / "x.npy"),)), {"x": IMAGES}, {"from": ["x.npy"]})


def named_npy(folder: Path) -> Example:
    """Arrays of other layouts: columns first in memory, and big end first."""
    numpy.save(folder / "a.npy", numpy.asfortranarray(IMAGES))
    numpy.save(folder / "b.npy", LABELS.astype(">i8"))
    request = PackRequest((f"label={folder / 'b.npy'}", f"image={folder / 'a.npy'}"))
    return Example(request, {"label": LABELS, "image": IMAGES})


def npz(folder: Path) -> Example:
    numpy.savez(folder / "x.npz", label=LABELS, image=IMAGES)
    return Example(PackRequest((str(folder / "x.npz"),)), {"image": IMAGES, "label": LABELS})


def packed_npz(folder: Path) -> Example:
    numpy.savez_compressed(folder / "x.npz", image=IMAGES, left=LABELS[:3], y=LABELS)
    request = PackRequest((str(folder / "x.npz"),), columns=("y", "image"))
    return Example(request, {"y": LABELS, "image": IMAGES})


def idx(folder: Path) -> Example:
    files = {"images-idx3": IMAGES, "labels-idx1": LABELS.astype("uint8")}
    for name, array in files.items():
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(
            gzip.compress(head + array.tobytes(), mtime=0)
        )
    return Example(PackRequest((str(folder),), part="test"), {"image": IMAGES, "label": LABELS})


def hdf5(folder: Path) -> Example:
    vectors = [numpy.arange(n % 4, dtype="int32") for n in range(20)]
    with h5py.File(folder / "x.h5", "w") as file:
        file["label"] = LABELS
        file.create_dataset(
            "group/pixels", data=IMAGES.astype("float32"), chunks=(7, 5, 4), compression="gzip"
        )
        file.create_dataset("words", data=WORDS, dtype=h5py.string_dtype())
        file.create_dataset("vectors", (20,), dtype=h5py.vlen_dtype("int32"))
        for number, vector in enumerate(vectors):
            file["vectors"][number] = vector
        file["alone"] = 7
    columns = {
        "group.pixels": IMAGES.astype("float32"),
        "vectors": vectors,
        "words": encoded(WORDS),
        "label": LABELS,
    }
    return Example(PackRequest((str(folder / "x.h5"),)), columns)


def images(folder: Path, mode: str = "RGB", size: tuple[int, int] = (4, 6)) -> Example:
    files, pixels, labels = [], [], []
    for label, name in enumerate(["cats", "dogs"]):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("no image")
        for number in range(3):
            path = folder / name / f"{number}.png"
            colours = numpy.full((4, 6, 3), 40 * number + 100 * label, dtype="uint8")
            Image.fromarray(colours).save(path)
            files.append(numpy.frombuffer(path.read_bytes(), dtype="uint8"))
            pixels.append(colours if mode == "RGB" else colours[:, :, 0])
            labels.append(label)
    request = PackRequest((str(folder),), size=size, grey=mode == "L")
    values = numpy.stack(pixels) if size[0] else files
    about = {"classes": ["cats", "dogs"], "images": "pixels" if size[0] else "files"}
    return Example(request, {"image": values, "label": numpy.array(labels)}, about)


def grey_images(folder: Path) -> Example:
    return images(folder, "L")


def image_files(folder: Path) -> Example:
    return images(folder, size=(0, 0))


def texts(folder: Path, **options: Any) -> PackRequest:
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, newline="")
    (folder / ".hidden").write_text("never read")
    return PackRequest((str(folder),), **options)


def windows(flat: numpy.ndarray, length: int) -> numpy.ndarray:
    starts = range(0, len(flat) - length, length)
    return numpy.stack([flat[start : start + length + 1] for start in starts])


def encoded(words: list[str]) -> list[numpy.ndarray]:
    return [numpy.frombuffer(word.encode(), dtype="uint8") for word in words]


def text_bytes(folder: Path) -> Example:
    rows = windows(numpy.frombuffer(JOINED.encode(), dtype="uint8"), 7)
    return Example(texts(folder, length=7), {"tokens": rows}, {"text": "bytes", "vocabulary": 256})


def text_files(folder: Path) -> Example:
    return Example(texts(folder), {"tokens": encoded(list(TEXTS.values()))})


def characters(folder: Path) -> Example:
    letters = "".join(sorted(set(JOINED)))
    numbers = numpy.array([letters.index(letter) for letter in JOINED], dtype="uint8")
    about = {"text": "characters", "vocabulary": len(letters), "characters": letters}
    request = texts(folder, text="characters", length=5)
    return Example(request, {"tokens": windows(numbers, 5)}, about)


def tokenizer_file(folder: Path) -> tuple[Any, Path]:
    """A tokenizer that would cut and fill what it is given, if it were let."""
    from tokenizers import Tokenizer

    from paceline.data.vocabulary import train_tokenizer

    tokenizer = Tokenizer.from_str(train_tokenizer([JOINED], 270))
    path = folder.with_name(f"{folder.name}-tokenizer.json")
    tokenizer.save(str(path))
    tree = json.loads(path.read_text())
    limits = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tree["truncation"] = limits
    path.write_text(json.dumps(tree))
    return tokenizer, path


def tokens(folder: Path) -> Example:
    tokenizer, path = tokenizer_file(folder)
    ends = tokenizer.token_to_id("<|endoftext|>")
    parts = [tokenizer.encode(text).ids for text in TEXTS.values()]
    flat = numpy.array([*parts[0], ends, *parts[1], ends, *parts[2]], dtype="uint16")
    about = {"text": "tokens", "vocabulary": tokenizer.get_vocab_size(), "end_of_text": ends}
    request = texts(folder, tokenizer=str(path), length=6)
    return Example(request, {"tokens": windows(flat, 6)}, about)


def token_files(folder: Path) -> Example:
    tokenizer, path = tokenizer_file(folder)
    parts = [tokenizer.encode(text).ids for text in TEXTS.values()]
    rows = [numpy.array(part, dtype="uint16") for part in parts]
    return Example(texts(folder, text="tokens", tokenizer=str(path)), {"tokens": rows})


def csv(folder: Path) -> Example:
    lines = [f'{n % 3}, {n / 4 if n else 7},"{word}\n",{n}\n' for n, word in enumerate(WORDS)]
    (folder / "x.csv").write_text("label,weight,word,number\n" + "".join(lines))
    columns = {
        "weight": numpy.array([7, *(n / 4 for n in range(1, 20))]),
        "word": encoded([f"{word}\n" for word in WORDS]),
        "number": numpy.arange(20),
        "label": LABELS,
    }
    return Example(PackRequest((str(folder / "x.csv"),)), columns)


def tsv(folder: Path) -> Example:
    for part in range(2):
        lines = [f"{part}.{n}\t{n}\n" for n in range(6)]
        (folder / f"{part}.tsv").write_text("a\tb\n" + "".join(lines))
    values = numpy.array([float(f"{part}.{n}") for part in range(2) for n in range(6)])
    return Example(PackRequest((str(folder),), columns=("a",)), {"a": values})


def parquet(folder: Path) -> Example:
    lists = [list(range(n % 4)) for n in range(20)]
    table = pyarrow.table(
        {
            "label": pyarrow.array(LABELS),
            "half": pyarrow.array(numpy.arange(20, dtype="float16")),
            "flag": pyarrow.array([n % 2 == 0 for n in range(20)]),
            "word": pyarrow.array(WORDS).dictionary_encode(),
            "list": pyarrow.array(lists, pyarrow.list_(pyarrow.int16())),
            "pair": pyarrow.array([[n, -n] for n in range(20)], pyarrow.list_(pyarrow.int32(), 2)),
        }
    )
    pyarrow.parquet.write_table(table, folder / "x.parquet", row_group_size=6)
    columns = {
        "half": numpy.arange(20, dtype="float16"),
        "flag": numpy.arange(20) % 2 == 0,
        "word": encoded(WORDS),
        "list": [numpy.array(one, dtype="int16") for one in lists],
        "pair": numpy.array([[n, -n] for n in range(20)], dtype="int32"),
        "label": LABELS,
    }
    return Example(PackRequest((str(folder / "x.parquet"),)), columns)


KINDS: list[Callable[[Path], Example]] = [
    npy, named_npy, npz, packed_npz, idx, hdf5, images, grey_images, image_files, text_bytes, text_files, characters,
    tokens, token_files, csv, tsv, parquet,
]  # fmt: skip


def read_back(folder: Path) -> dict[str, Any]:
    """Return every column of a set, read with plain safetensors."""
    index = DatasetIndex.from_json((folder / INDEX).read_bytes(), "index.json")
    shards = [load_file(folder / shard.name) for shard in index.shards]
    found: dict[str, Any] = {}
    for column in index.columns:
        parts = [shard[column.name] for shard in shards]
        if column.varying:
            offsets = [shard[column.name + OFFSETS] for shard in shards]
            found[column.name] = [p[a:b] for p, o in zip(parts, offsets) for a, b in zip(o, o[1:])]  # noqa: B905, RUF007
        else:
            found[column.name] = numpy.concatenate(parts)
    return found


def alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """See that columns are the same, in the same order, of the same types."""
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert len(found[name]) == len(values), name
        for one, other in zip(found[name], values):  # noqa: B905
            assert numpy.asarray(one).dtype == numpy.asarray(other).dtype, name
            assert numpy.array_equal(one, other), name


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
