"""Lesson 32: Files for a parallel file system.

A parallel file system keeps the bytes of files on many servers, and their names on few: each open asks
a metadata server, which all jobs of a cluster share. With one file per sample, an epoch opens as many
files as it has samples; readers (ranks times DataLoader workers) wait for the same server, so more of
them do not help. A shard holds many samples, and an index says where each one lies: a reader opens
each shard once. Here, an audit hook counts the opens of files of this lesson. It lets one pass at a
time, each in 0.5 ms, as a metadata server does; the opens are real, this server is not.

    python lessons/32_shards.py

Expect: 1,437 opens per epoch with one file per sample, for any number of readers; 16 readers are hardly
faster than one, since each waits up to 16 times as long. With shards, five opens per reader: four
shards and the index. Paceline's shards, which `paceline data pack` writes as well, need about as few,
and every byte is verified. The hook sees opens by Python, not those of native libraries.
Time: about 10 s on 2 cores.
New since lesson 11: `at_open`; three ways to `read`: `files`, `shards` and `packed`; `create` writes for all;
`epoch` and `main` compare them, with `READERS`, `SHARDS`, `OPEN_S`, `FORK` and `COUNTS`. Nothing is trained, so
`pick_device`, `join`, `make_model`, `accuracy`, `stream`, `EPOCHS`, `BATCH`, `RATE` and `CHUNK` are gone.
"""

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch

import paceline
from paceline.data.pack import pack_samples
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

READERS, SHARDS, OPEN_S, FOLDER = (1, 4, 16), 4, 0.0005, Path("lesson-32")
FORK = get_context("fork")
COUNTS = FORK.Array("d", 3)  # opens, seconds in them, and a checksum, over all processes


def at_open(event: str, arguments: tuple[object, ...]) -> None:
    """Count an open of a file of this lesson; it waits for its turn, as at a metadata server."""
    if event == "open" and f"{FOLDER}/" in str(arguments[0]):
        begun = time.perf_counter()
        with COUNTS.get_lock():
            time.sleep(OPEN_S)
            COUNTS[0] += 1
            COUNTS[1] += time.perf_counter() - begun


def create(folder: Path) -> int:
    """Write compressed digits as files, as shards with an index, and with Paceline; return how many."""
    (images, _), _ = embedded_digits()
    samples = [zlib.compress(image.numpy().tobytes()) for image in images]
    (folder / "files").mkdir(parents=True, exist_ok=True)
    index, each = [], -(-len(samples) // SHARDS)
    for number, sample in enumerate(samples):
        (folder / "files" / f"{number:05}").write_bytes(sample)
    for shard in range(SHARDS):
        begin, parts = 0, samples[shard * each : (shard + 1) * each]
        for part in parts:
            index.append((shard, begin, len(part)))
            begin += len(part)
        (folder / f"{shard}.shard").write_bytes(b"".join(parts))
    (folder / "index.json").write_text(json.dumps(index))
    whole = sum(map(len, samples))
    pack_samples(
        ({"digit": sample} for sample in samples),
        folder / "packed",
        shard_bytes=whole // SHARDS,
        force=True,
    )
    return len(samples)


def files() -> Callable[[int], bytes]:
    """Read from one file per sample."""
    return lambda number: (FOLDER / "files" / f"{number:05}").read_bytes()


def shards() -> Callable[[int], bytes]:
    """Read from shards that are opened once."""
    index = json.loads((FOLDER / "index.json").read_text())
    opened = [(FOLDER / f"{shard}.shard").open("rb") for shard in range(SHARDS)]

    def read(number: int) -> bytes:
        shard, begin, size = index[number]
        return os.pread(opened[shard].fileno(), size, begin)

    return read


def packed() -> Callable[[int], bytes]:
    """Read from Paceline's shards."""
    dataset = paceline.open_dataset(FOLDER / "packed", paceline.RunConfig())
    return lambda number: dataset[number][0].numpy().tobytes()


def epoch(layout: Callable[[], Callable[[int], bytes]], readers: int, samples: int) -> float:
    """Let all readers read their part of an epoch; return the checksum of all samples."""
    order, begun = torch.randperm(samples).tolist(), time.perf_counter()
    COUNTS[:] = 0, 0, 0

    def read(reader: int) -> None:
        sample = layout()
        checksum = sum(zlib.crc32(sample(number)) for number in order[reader::readers])
        with COUNTS.get_lock():
            COUNTS[2] += checksum

    processes = [FORK.Process(target=read, args=(reader,)) for reader in range(readers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    opens, each_s, whole_s = COUNTS[0], COUNTS[1] / COUNTS[0], time.perf_counter() - begun
    print(
        f"{readers} readers, {layout.__name__}: {opens:,.0f} opens, {1000 * each_s:.1f} ms each, {whole_s:.2f} s"
    )
    return COUNTS[2]


def main() -> None:
    """Read the same samples in three ways."""
    samples = create(FOLDER)
    sys.addaudithook(at_open)
    for readers in READERS:
        checksums = {epoch(layout, readers, samples) for layout in (files, shards, packed)}
        assert len(checksums) == 1, f"with {readers} readers the samples are not the same"


if __name__ == "__main__":
    main()
