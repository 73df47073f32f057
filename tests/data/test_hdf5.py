"""An HDF5 file is read as it is: every chunk once, in bounded memory, in every process; or it is refused with the reason."""

import copy
import fcntl
import io
import multiprocessing
import os
import random
import sys
import threading
import tracemalloc
from collections import Counter

import h5py
import numpy
import pytest
import torch

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.hdf5 import source as hdf5_source
from paceline.data.hdf5.chunks import Blocks, inspect, plan_blocks
from paceline.data.hdf5.file import H5Column
from paceline.data.hdf5.source import H5Source
from paceline.data.order import Order
from paceline.data.pack import PackRequest, pack
from paceline.data.reading.batches import Batches
from paceline.data.reading.open_dataset import open_dataset
from paceline.data.reading.source import TensorSource, as_source
from paceline.errors import ConfigError, DataError, EnvironmentUnfit, PacelineError
from paceline.scale.batch import BatchPlan
from paceline.world.world import World

KEY = 7, 0
SIZE = 331  # divides by nothing
IMAGES = numpy.arange(SIZE * 12, dtype="int32").reshape(SIZE, 3, 4)
LABELS = numpy.arange(SIZE, dtype="int64") % 10


def write(path, **columns):
    """Write datasets; a column is an array, or an array and how it is stored."""
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            data, how = column if isinstance(column, tuple) else (column, {})
            file.create_dataset(name, data=data, **how)
    return path


@pytest.fixture
def small(tmp_path):
    """A file of images in chunks of 16 and labels in chunks of 8."""
    labels = LABELS, {"chunks": (8,), "compression": "gzip"}
    return write(tmp_path / "a.h5", images=(IMAGES, {"chunks": (16, 3, 4)}), labels=labels)


def requests(size, block, window, rank=0, world=1, start=0, together=3, key=KEY):
    """Yield what a rank asks for in one epoch: its lanes of a few steps at a time."""
    plan = BatchPlan(size, global_size=24, lanes=6, rank=rank, size=world)
    order = Order(size, block, window)
    for first in range(start, plan.steps_per_epoch, together):
        steps = [
            plan.step(step) for step in range(first, min(first + together, plan.steps_per_epoch))
        ]
        spans = [lane.places for step in steps for lane in step.lanes]
        yield order.at(
            numpy.concatenate([numpy.arange(span.start, span.stop) for span in spans]), *key
        )


class Tracked(io.RawIOBase):
    """A file that knows which of its bytes were read."""

    def __init__(self, path):
        self.file, self.at, self.reads = os.open(path, os.O_RDONLY), 0, []

    def seek(self, offset, whence=0):
        self.at = offset + (os.fstat(self.file).st_size if whence == 2 else 0)
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        self.reads.append((self.at, len(buffer)))
        return os.preadv(self.file, [buffer], self.at)

    def close(self):
        if not self.closed:
            os.close(self.file)
        super().close()


class Reads:
    """How often each chunk was read from the file by what was opened meanwhile: seen at the file, not at our own calls."""

    def __init__(self, path, monkeypatch):
        self.files, real = [], h5py.File
        with real(path) as file:
            self.chunks = {
                (name, chunk.chunk_offset): (chunk.byte_offset, chunk.byte_offset + chunk.size)
                for name in ("images", "labels")
                for chunk in map(
                    file[name].id.get_chunk_info, range(file[name].id.get_num_chunks())
                )
            }

        def tracked(path, mode, **settings):
            self.files.append(Tracked(path))
            return real(self.files[-1], mode, **settings)

        monkeypatch.setattr(h5py, "File", tracked)

    def taken(self):
        """Return how often each chunk was read since this was asked last."""
        found = Counter()
        for file in self.files:
            for begin, size in file.reads:
                ends = {begin, begin + size}
                found.update(
                    chunk
                    for chunk, (first, last) in self.chunks.items()
                    if first < max(ends) and min(ends) < last
                )
            file.reads.clear()
        return found


@pytest.mark.parametrize(
    "how", [{}, {"compression": "gzip", "shuffle": True}], ids=["plain", "gzip"]
)
@pytest.mark.parametrize("window", [1, 3, 1000])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_chunk_is_read_once_and_every_sample_is_right(
    tmp_path, monkeypatch, how, window, world
):
    labels = LABELS, {"chunks": (8,), **how}
    path = write(tmp_path / "a.h5", images=(IMAGES, {"chunks": (16, 3, 4), **how}), labels=labels)
    reads, memory = (
        Reads(path, monkeypatch),
        TensorSource(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
    )
    for rank in range(world):
        source = H5Source(path, ["images", "labels"], block_bytes=1)
        source.window = window
        assert source.block == 16
        reads.taken()
        for samples in requests(SIZE, source.block, window, rank, world):
            found, expected = source.gather(samples, KEY), memory.gather(samples, KEY)
            assert all(
                torch.equal(mine, other) for mine, other in zip(found, expected, strict=True)
            )
        counts = reads.taken()
        assert set(counts.values()) == {1}
        assert len(counts) == len(reads.chunks) or window < 1000, (
            "a window of all needs every chunk"
        )


def test_no_chunk_is_read_twice_in_any_epoch(small, monkeypatch):
    reads, source = Reads(small, monkeypatch), H5Source(small, block_bytes=1)
    source.window = 3
    for epoch in range(3):
        reads.taken()
        for samples in requests(SIZE, 16, 3, key=(7, epoch)):
            source.gather(samples, (7, epoch))
        assert set(reads.taken().values()) == {1}


def test_a_run_that_goes_on_reads_the_present_window_alone(small, monkeypatch):
    reads, source = Reads(small, monkeypatch), H5Source(small, block_bytes=1)
    source.window = 3
    reads.taken()
    samples = next(requests(SIZE, 16, 3, start=9, together=1))
    assert torch.equal(source.gather(samples, KEY)[0], torch.from_numpy(IMAGES[samples]))
    images = [chunk for chunk in reads.taken() if chunk[0] == "images"]
    assert 0 < len(images) <= 2 * 3


def test_a_piece_may_be_larger_than_the_windows(small, monkeypatch):
    reads, source = Reads(small, monkeypatch), H5Source(small, block_bytes=1)
    source.window = 1
    reads.taken()
    everything = Order(SIZE, 16, 1).at(numpy.arange(SIZE), *KEY)
    assert torch.equal(source.gather(everything, KEY)[0], torch.from_numpy(IMAGES[everything]))
    assert Counter(reads.taken().values()) == {1: len(reads.chunks)}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_samples_may_be_asked_for_in_any_order(small, window):
    source, chance = H5Source(small, block_bytes=1), numpy.random.default_rng(window)
    source.window = window
    for _ in range(200):
        samples = chance.integers(0, SIZE, chance.integers(1, 9))
        assert source.gather(samples, KEY)[0][:, 0, 0].tolist() == (samples * 12).tolist()


def test_memory_holds_two_windows_and_no_more(tmp_path):
    rows = numpy.random.default_rng(0).integers(0, 255, (3000, 500), dtype="uint8")
    path = write(
        tmp_path / "a.h5",
        x=(rows, {"chunks": (100, 500)}),
        y=(numpy.arange(3000), {"chunks": (100,)}),
    )
    source = H5Source(path)
    assert source.block == 2100  # whole chunks, of about a MB
    source = H5Source(path, block_bytes=50_000)
    source.window = 3
    for samples in requests(3000, source.block, 3, start=123):  # what is imported and made once
        source.gather(samples, KEY)
    source = copy.copy(source)
    tracemalloc.start()
    for samples in requests(3000, source.block, 3, together=9):
        source.gather(samples, KEY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.block == 100
    assert 6 * 100 * 508 <= peak < 6 * 100 * 508 + 200_000


@pytest.mark.parametrize(
    ("columns", "plan"),
    [
        ([(4, 100)], Blocks(100)),
        ([(4, 100), (4, 75)], Blocks(300)),
        ([(4, 100), (4, 0)], Blocks(100)),
        ([(1 << 12, 100), (8, 3007)], Blocks(100, whole=("1",))),
        ([(1 << 12, 100), (1 << 12, 3007)], Blocks(3007, cut=("0",))),
        ([(4, 70_000)], Blocks(60_000)),
    ],
)
def test_a_block_ends_where_the_chunks_of_all_columns_end(columns, plan):
    given = [
        H5Column(str(number), "uint8", 60_000, (size,), (rows, size) if rows else ())
        for number, (size, rows) in enumerate(columns)
    ]
    assert plan_blocks(given, block_bytes=1) == plan


def test_columns_whose_chunks_do_not_fit_are_kept_or_read_twice_at_most(
    tmp_path, monkeypatch, capsys
):
    images = numpy.arange(4000 * 6000, dtype="uint8").reshape(4000, 6000)
    path = write(
        tmp_path / "a.h5",
        images=(images, {"chunks": (50, 6000)}),
        labels=(numpy.arange(4000), {"chunks": (401,)}),
    )
    source = H5Source(path, block_bytes=1)
    reads = Reads(path, monkeypatch)
    source.window = 2
    for samples in requests(4000, source.block, 2, together=20):
        found = source.gather(samples, KEY)
        assert torch.equal(found[0][:, 1], torch.from_numpy(images[samples, 1]))
        assert torch.equal(found[1], torch.from_numpy(samples))
    assert source.block == 50
    assert set(reads.taken().values()) == {1}
    assert capsys.readouterr().err == ""


def test_chunks_that_lie_in_two_blocks_are_told_of(tmp_path, capsys):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (4000, 6000), "uint8", chunks=(50, 6000))
        file.create_dataset("others", (4000, 6000), "uint8", chunks=(401, 6000))
    assert H5Source(path).block == 401
    assert (
        "images: chunks that span two blocks of 401 samples are read twice"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("names", [("images", "labels"), ("labels", "images"), ("images",)])
def test_columns_come_as_they_are_asked_for(small, names):
    samples = numpy.array([330, 0, 17, 17])
    expected = {"images": IMAGES, "labels": LABELS}
    found = H5Source(small, names).gather(samples, KEY)
    assert [column.tolist() for column in found] == [
        expected[name][samples].tolist() for name in names
    ]


def test_without_names_all_come_as_they_would_be_packed(tmp_path):
    path = write(tmp_path / "a.h5", **{"label": LABELS, "train/images": IMAGES, "version": 3})
    source = as_source(H5Source(path))
    assert [column.name for column in source.columns] == ["train/images", "label"]
    assert len(source) == SIZE
    assert source.bytes_per_sample == 56
    names = [column.name for column in H5Source(path, ["/train//images"]).columns]
    assert names == ["/train//images"]


def test_columns_of_several_parts_are_never_joined(tmp_path):
    parts = {f"{part}/{name}": LABELS for part in ("train", "test") for name in ("x", "y")}
    path = write(tmp_path / "a.h5", **parts)
    for refused in (
        lambda: H5Source(path),
        lambda: pack(PackRequest((str(path),)), tmp_path / "p"),
    ):
        with pytest.raises(ConfigError, match=r"train \(train/x, train/y\), test") as caught:
            refused()
        assert 'columns=["train/x", "train/y"]' in caught.value.fix
    assert len(H5Source(path, ["train/x", "train/y"])) == SIZE


def test_groups_of_samples_are_packed_one_by_one(tmp_path):
    images = numpy.arange(6 * 5 * 4, dtype="uint8").reshape(6, 5, 2, 2)
    scores = numpy.arange(30, dtype="float32").reshape(6, 5)
    columns = {"images": images, "scores": scores, "label": numpy.arange(6)}
    path = write(tmp_path / "a.h5", **columns)
    index = pack(PackRequest((str(path),), 50, flatten=True), tmp_path / "p", workers=1)
    assert len(index.shards) > 2
    source = open_dataset(str(tmp_path / "p"), RunConfig())
    found = source.gather(numpy.arange(30), KEY)
    expected = images.reshape(30, 2, 2), scores.reshape(30), numpy.arange(6).repeat(5)
    assert [column.tolist() for column in found] == [column.tolist() for column in expected]
    write(path, images=images, other=scores[:, :3])
    with pytest.raises(ConfigError, match=r"--flatten.*\(6, 3\)"):
        pack(PackRequest((str(path),), flatten=True), tmp_path / "q")


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int8",
        ">u2",
        "<i2",
        ">i4",
        "uint32",
        ">u8",
        "int64",
        "float16",
        ">f4",
        "float64",
        "complex64",
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (0, 2)])
def test_numbers_of_every_type_come_as_they_are(tmp_path, dtype, shape):
    values = numpy.random.default_rng(1).integers(0, 2, (50, *shape)).astype(dtype)
    path = write(tmp_path / "a.h5", x=(values, {"chunks": (7, *shape)} if values.size else {}))
    found = H5Source(path, block_bytes=1).gather(numpy.array([49, 3]), KEY)[0]
    assert found.dtype == getattr(torch, values.dtype.name)
    assert numpy.array_equal(found.numpy(), values[[49, 3]])


def test_a_column_of_nothing_is_no_trouble(tmp_path):
    path = write(
        tmp_path / "a.h5",
        none=numpy.zeros((50, 2, 0), "f4"),
        x=(numpy.arange(50), {"chunks": (7,)}),
    )
    source = H5Source(path, block_bytes=1)
    source.window = 1
    none, x = source.gather(numpy.arange(50), KEY)
    assert none.shape == (50, 2, 0)
    assert x.tolist() == list(range(50))


def test_rows_that_lie_one_after_the_other_are_read_in_blocks(tmp_path):
    values = numpy.random.default_rng(1).random((1000, 600))
    source = H5Source(write(tmp_path / "a.h5", x=values))
    assert source.block == round((1 << 20) / 4800)
    samples = numpy.random.default_rng(2).permutation(1000)
    assert numpy.array_equal(source.gather(samples, KEY)[0].numpy(), values[samples])


def test_memory_that_is_there_already_is_filled(small):
    source = H5Source(small)
    room = source.new_buffer(10)
    filled = source.gather_into(numpy.array([5, 4]), room)
    assert filled[0].data_ptr() == room.tensors[0].data_ptr()
    assert filled[1].tolist() == [5, 4]
    assert [len(one) for one in source.gather(numpy.array([], dtype=numpy.int64), KEY)] == [0, 0]
    assert [column.tolist() for column in source[14]] == [IMAGES[14].tolist(), 4]
    for sample in (-1, SIZE):
        with pytest.raises(IndexError, match="of 331"):
            source.gather(numpy.array([1, sample]), KEY)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_every_process_opens_the_file_for_itself(small):
    source = H5Source(small, block_bytes=1)
    source.window = 2
    pieces = list(requests(SIZE, 16, 2, together=1))
    source.gather(pieces[0], KEY)
    receive, send = multiprocessing.Pipe(duplex=False)

    def child():
        own = [
            torch.equal(source.gather(piece, KEY)[0], torch.from_numpy(IMAGES[piece]))
            for piece in pieces
        ]
        send.send((all(own), len(source._readers)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    for piece in pieces:
        assert torch.equal(source.gather(piece, KEY)[0], torch.from_numpy(IMAGES[piece]))
    assert receive.recv() == (True, 2)
    process.join()
    assert process.exitcode == 0
    receive.close()
    send.close()


def test_a_copy_for_another_process_takes_no_open_file_along(small):
    source = H5Source(small)
    source.gather(numpy.array([1]), KEY)
    other = copy.copy(source)
    assert other._readers == {}
    assert other.gather(numpy.array([9]), KEY)[1].tolist() == [9]


@pytest.mark.parametrize(("world", "start"), [(1, 0), (2, 5)])
def test_a_training_reads_ahead_from_the_file_what_it_would_read_from_memory(small, world, start):
    settings = RunConfig(epochs=2, batch=BatchConfig(24, lanes=6), read=ReadConfig(window=3))
    memory = TensorSource(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    for rank in range(world):
        source = open_dataset(str(small), settings)
        batches = Batches(source, settings, World(rank=rank, size=world))
        order = Order(SIZE, source.block, 3)
        count = start
        for step in batches.steps(start):
            for lane, planned in zip(step.lanes, step.plan.lanes, strict=True):
                samples = order.at(numpy.array(planned.places), settings.seed, step.plan.epoch)
                expected = memory.gather(samples, KEY)
                assert all(
                    torch.equal(mine, other)
                    for mine, other in zip(lane.batch, expected, strict=True)
                )
            count += 1
        assert count == batches.total_steps == 28


def test_threads_may_read_at_the_same_time(small):
    source = H5Source(small, block_bytes=1)
    source.window = 2
    pieces, found = list(requests(SIZE, 16, 2, together=1)), {}

    def read(mine):
        for number in mine:
            found[number] = source.gather(pieces[number], KEY)[0]

    threads = [
        threading.Thread(target=read, args=(range(first, len(pieces), 3),)) for first in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        torch.equal(found[number], torch.from_numpy(IMAGES[piece]))
        for number, piece in enumerate(pieces)
    )


def test_chunks_with_a_part_of_each_sample_are_read_once_and_told_of(tmp_path, monkeypatch, capsys):
    images = numpy.random.default_rng(0).integers(0, 255, (2000, 28, 28), dtype="uint8")
    path = write(
        tmp_path / "a.h5",
        images=(images, {"chunks": (250, 7, 14)}),
        labels=(numpy.arange(2000), {"chunks": (250,)}),
    )
    source = H5Source(path, block_bytes=1)
    H5Source(path, block_bytes=1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "images: one sample lies in 8 chunks of 24.5 kB" in said
    assert "every chunk is decoded 250 times" in said
    assert "chunks=(1337, 28, 28)" in said
    assert f"paceline data pack {path} --to FOLDER" in said
    reads = Reads(path, monkeypatch)
    for samples in requests(2000, source.block, 16, together=20):
        assert torch.equal(source.gather(samples, KEY)[0], torch.from_numpy(images[samples]))
    assert Counter(reads.taken().values()) == {1: 8 * 8 + 8}
    hdf5_source._say_once.cache_clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    H5Source(path)
    assert capsys.readouterr().err == "", "one rank says it for all"


def test_what_cannot_be_read_in_bounded_memory_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (1_281_167, 224, 224, 3), "uint8", chunks=True)
        file.create_dataset("one", (2, 1 << 30), "uint8")
    with pytest.raises(
        DataError, match="bounded memory: a block of 20,019 samples(.|\n)*chunks="
    ) as caught:
        H5Source(path, ["images"])
    assert "images" in caught.value.problem
    with pytest.raises(DataError, match=r"a block of 1 samples takes 1\.1 GB"):
        H5Source(path, ["one"])
    assert "it refuses the file" in str(inspect(path)[0])


def test_a_window_that_no_machine_holds_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 40, 1 << 10), "uint8", chunks=(1 << 10, 1 << 10))
    source = H5Source(path)
    assert source.gather(numpy.array([(1 << 40) - 1]), KEY)[0].shape == (1, 1 << 10)
    source.window = 1 << 28
    with pytest.raises(ConfigError, match=r"(?s)GB; this machine has.*read\.window=\d+"):
        source.gather(numpy.array([0]), KEY)


def test_a_layout_is_told_with_its_cost_and_the_fix(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "auto", (60000, 28, 28), "uint8", chunks=(3750, 4, 4), compression="gzip"
        )
        file.create_dataset("big", data=numpy.zeros((9, 1 << 20), "uint8"), chunks=(9, 1 << 20))
        file.create_dataset("good", data=numpy.zeros((5000, 100)), chunks=(500, 100))
        file.create_dataset("plain", data=numpy.zeros(9))
        file.create_dataset("small", data=numpy.zeros(900), chunks=(64,))
        file.create_dataset("words", data=["a", "bc"])
    found = {finding.name: finding for finding in inspect(path)}
    texts = {name: str(finding) for name, finding in found.items()}
    assert texts["auto"].startswith(
        "auto: 60,000 samples of uint8 (28, 28), chunks (3750, 4, 4) of 60.0 kB, one sample in 49 of them, deflate\n"
        "  cost: one sample lies in 49 chunks of 60.0 kB: read sample by sample, every chunk is decoded 3,750 times"
    )
    assert "create_dataset('auto', ..., chunks=(1337, 28, 28))" in texts["auto"]
    assert "784 of its chunks were never written" in texts["auto"]
    assert "a chunk of 9.4 MB does not fit into HDF5's cache" in texts["big"]
    assert [problem.here for problem in found["big"].problems] == [False]
    assert (
        texts["good"]
        == "good: 5,000 samples of float64 (100,), chunks (500, 100) of 400.0 kB, not compressed"
    )
    assert texts["plain"] == "plain: 9 samples of float64 (), not chunked, not compressed"
    assert "chunks of 512 B take longer to find than to read: 2,048 per MB" in texts["small"]
    assert "words: cannot be read as samples\n  cost: words of" in texts["words"]


def link_out(file):
    file["x"] = h5py.ExternalLink("pipe", "x")


def link_in_circles(file):
    file["x"], file["y"] = h5py.SoftLink("/y"), h5py.SoftLink("x")


def virtual(file):
    layout = h5py.VirtualLayout((100,), "int8", maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED] = h5py.VirtualSource("pipe", "x", (100,), maxshape=(None,))[
        : h5py.h5s.UNLIMITED
    ]
    file.create_virtual_dataset("x", layout)


def stored_elsewhere(file):
    file.create_dataset("x", (100,), "int8", external=[("pipe", 0, 100)])


def unknown_filter(file):
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((10,))
    plan.set_filter(32768 + 77, h5py.h5z.FLAG_OPTIONAL, ())
    h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I8LE, h5py.h5s.create_simple((100,)), plan)


@pytest.mark.parametrize(
    ("make", "problem", "fix"),
    [
        (lambda file: None, "no dataset x", "use one of"),
        (lambda file: file.create_dataset("xs", (4,), "f4"), "no dataset x", "did you mean xs"),
        (lambda file: file.create_group("x"), "x of .* is not a dataset", ""),
        (lambda file: file.create_dataset("x", data=3), "single value", "columns="),
        (
            lambda file: file.create_dataset("x", data=h5py.Empty("f")),
            "single value",
            "columns=",
        ),
        (lambda file: file.create_dataset("x", data=["a", "bc"]), "text", "paceline data pack"),
        (
            lambda file: file.create_dataset("x", (3,), h5py.vlen_dtype("i4")),
            "varying length",
            "paceline data pack",
        ),
        (lambda file: file.create_dataset("x", (3,), "S5"), "type |S5", "numbers of a fixed width"),
        (lambda file: file.create_dataset("x", (3,), [("a", "i4")]), "not a number", "columns="),
        (
            lambda file: file.create_dataset("x", (3,), h5py.ref_dtype),
            "cannot be stacked",
            "columns=",
        ),
        (link_out, "leads out of the file", "into one file"),
        (link_in_circles, "leads out of the file, or to no dataset", "into one file"),
        (virtual, "made of other files", "into one file"),
        (stored_elsewhere, "made of other files", "into one file"),
        (unknown_filter, "filter 32845.*is not installed", "hdf5plugin"),
    ],
)
def test_what_is_not_samples_is_refused_with_the_reason(tmp_path, make, problem, fix):
    os.mkfifo(tmp_path / "pipe")  # who opens it waits for ever
    with h5py.File(tmp_path / "a.h5", "w") as file:
        make(file)
    with pytest.raises(DataError, match=problem) as caught:
        H5Source(tmp_path / "a.h5", ["x"])
    assert str(tmp_path / "a.h5") in caught.value.problem
    assert fix in caught.value.fix
    inspect(tmp_path / "a.h5")
    with pytest.raises(DataError, match="must have the same number of samples|" + problem):
        H5Source(tmp_path / "a.h5", ["xs", "x"] if "xs" in fix else ())


def test_a_link_within_the_file_is_followed(tmp_path):
    path = write(tmp_path / "a.h5", **{"deep/down/x": LABELS})
    with h5py.File(path, "a") as file:
        file["deep/way"], file["short"] = h5py.SoftLink("down"), h5py.SoftLink("/deep/way/x")
    assert H5Source(path, ["short"]).gather(numpy.array([13]), KEY)[0].tolist() == [3]


def test_datasets_of_different_lengths_are_no_set(tmp_path):
    path = write(tmp_path / "a.h5", x=LABELS, y=LABELS, z=LABELS[:9])
    with pytest.raises(DataError, match=r"(?s)x: 331, z: 9, y: 331.*columns=\[") as caught:
        H5Source(path)
    assert len(H5Source(path, ["x", "y"])) == SIZE
    with pytest.raises(DataError, match="got none"):
        H5Source(write(tmp_path / "empty.h5"))
    assert caught.value.exit_code == 3


def test_what_is_not_a_whole_file_is_refused(small, tmp_path):
    content = small.read_bytes()
    (tmp_path / "text.h5").write_text("no HDF5, though it says so")
    (tmp_path / "cut.h5").write_bytes(content[:-1000])
    (tmp_path / "empty.h5").touch()
    os.mkfifo(tmp_path / "pipe")
    cases = {
        "none.h5": "there is no file",
        ".": "no file",
        "pipe": "no file",
        "cut.h5": "it is truncated",
    }
    for name, problem in (
        cases | dict.fromkeys(["text.h5", "empty.h5"], "is not an HDF5 file")
    ).items():
        for look in (H5Source, inspect):
            with pytest.raises(DataError, match=problem):
                look(tmp_path / name)


def test_a_damaged_chunk_is_found_when_it_is_read_and_others_are_still_good(small):
    with h5py.File(small) as file:
        at = file["labels"].id.get_chunk_info_by_coord((16,)).byte_offset
    content = bytearray(small.read_bytes())
    content[at : at + 6] = b"damage"
    small.write_bytes(content)
    source = H5Source(small, block_bytes=1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"labels of .*a\.h5, rows 16 to 31, cannot be read"):
            source.gather(numpy.array([17]), KEY)
        assert source.gather(numpy.array([1, 40]), KEY)[1].tolist() == [1, 0]


def test_a_file_that_has_changed_is_not_read_on(small):
    source = H5Source(small)
    write(small, images=IMAGES[:-1], labels=LABELS[:-1])
    with pytest.raises(DataError, match="has changed"):
        source.gather(numpy.array([1]), KEY)


def test_a_file_that_is_being_written_is_waited_for_by_people(small):
    with small.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written"):
            H5Source(small)


def test_a_file_system_without_locks_will_do(small, monkeypatch):
    real = h5py.File

    def without_locks(path, mode, *, locking=None, **settings):
        if locking is None:
            raise OSError(
                "Unable to open file (unable to lock file, errno = 37, error message = 'No locks available')"
            )
        return real(path, mode, locking=locking, **settings)

    monkeypatch.setattr(h5py, "File", without_locks)
    assert H5Source(small).gather(numpy.array([13]), KEY)[1].tolist() == [3]


def test_without_h5py_it_says_how_to_get_it(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(EnvironmentUnfit, match="pip install h5py"):
        H5Source(small)


def damage(content, seed):
    chance, bad = random.Random(seed), bytearray(content)
    if chance.random() < 0.1:
        return bad[: chance.randrange(len(bad))]
    for _ in range(chance.choice([1, 1, 2, 16])):
        at = chance.randrange(len(bad) if chance.random() < 0.5 else 4096)
        bad[at] = chance.choice(
            [0, 255, chance.randrange(256), bad[at] ^ (1 << chance.randrange(8))]
        )
    return bad


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_damaged_files_never_end_the_process(tmp_path):
    how = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    images, labels = (IMAGES, {"chunks": (32, 3, 4), **how}), (LABELS, {"chunks": (48,)})
    content = write(tmp_path / "a.h5", **{"g/images": images, "labels": labels}).read_bytes()

    def child():
        path = tmp_path / "bad.h5"
        for seed in range(60):
            path.write_bytes(damage(content, seed))
            try:
                inspect(path)
                source = H5Source(path, block_bytes=1)
                source.gather(numpy.arange(min(400, len(source))), KEY)
            except PacelineError:
                pass

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_an_encoded_chunk_of_no_bytes_is_refused(tmp_path):
    """HDF5 would take the checksum of less than nothing, and end the process."""
    path = write(
        tmp_path / "a.h5", x=(LABELS, {"chunks": (50,), "compression": "gzip", "fletcher32": True})
    )
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info_by_coord((100,))
    content = path.read_bytes()
    entry = chunk.size.to_bytes(4, "little") + bytes(4) + (100).to_bytes(8, "little")
    assert content.count(entry) == 1
    path.write_bytes(content.replace(entry, bytes(8) + (100).to_bytes(8, "little")))
    with pytest.raises(DataError, match=r"a chunk of 0 bytes at \(100,\)"):
        H5Source(path).gather(numpy.array([0]), KEY)
