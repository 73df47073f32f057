"""An HDF5 file is read as it is: every chunk once, in bounded memory, in every process; or it is refused with the reason."""

import copy
import fcntl
import io
import multiprocessing
import os
import random
import sys
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy
import pytest
import torch

from paceline.config import BatchConfig, ReadConfig, RunConfig
from paceline.data.hdf5.chunks import Blocks, inspect, plan_blocks
from paceline.data.hdf5.file import H5Column
from paceline.data.hdf5.source import H5Source
from paceline.data.order import Order
from paceline.data.pack import PackRequest, pack
from paceline.data.reading.batches import Batches
from paceline.data.reading.open_dataset import open_dataset
from paceline.data.reading.source import as_source
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
        steps = map(plan.step, range(first, min(first + together, plan.steps_per_epoch)))
        spans = [lane.places for step in steps for lane in step.lanes]
        yield order.at(
            numpy.concatenate([numpy.arange(span.start, span.stop) for span in spans]), *key
        )


def check(found, samples):
    """See that columns are the images and the labels of some samples."""
    for column, wanted in zip(found, (IMAGES, LABELS), strict=True):
        assert numpy.array_equal(column.numpy(), wanted[samples])


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
    ("how", "window", "world"),
    [
        ({}, 1, 3),
        ({"compression": "gzip", "shuffle": True}, 3, 2),
        ({"compression": "gzip", "shuffle": True}, 1000, 1),
    ],
)
def test_every_chunk_is_read_once_and_every_sample_is_right(
    tmp_path, monkeypatch, how, window, world
):
    labels = LABELS, {"chunks": (8,), **how}
    path = write(tmp_path / "a.h5", images=(IMAGES, {"chunks": (16, 3, 4), **how}), labels=labels)
    reads = Reads(path, monkeypatch)
    for rank in range(world):
        source = H5Source(path, ["images", "labels"], block_bytes=1)
        source.window = window
        assert source.block == 16
        for epoch in range(1 if window == 1000 else 3):
            reads.taken()
            for samples in requests(SIZE, 16, window, rank, world, key=(7, epoch)):
                check(source.gather(samples, (7, epoch)), samples)
            counts = reads.taken()
            assert set(counts.values()) == {1}
            assert len(counts) == len(reads.chunks) or window < 1000


def test_a_run_that_goes_on_reads_the_present_window_alone(small, monkeypatch):
    reads, source = Reads(small, monkeypatch), H5Source(small, block_bytes=1)
    source.window = 3
    reads.taken()
    samples = next(requests(SIZE, 16, 3, start=9, together=1))
    check(source.gather(samples, KEY), samples)
    images = [chunk for chunk in reads.taken() if chunk[0] == "images"]
    assert 0 < len(images) <= 2 * 3


def test_samples_may_be_asked_for_in_any_order_and_all_at_once(small, monkeypatch):
    reads, source = Reads(small, monkeypatch), H5Source(small, block_bytes=1)
    source.window, chance = 1, numpy.random.default_rng(1)
    reads.taken()
    everything = Order(SIZE, 16, 1).at(numpy.arange(SIZE), *KEY)
    check(source.gather(everything, KEY), everything)
    assert Counter(reads.taken().values()) == {1: len(reads.chunks)}
    for _ in range(200):
        samples = chance.integers(0, SIZE, chance.integers(1, 9))
        check(source.gather(samples, KEY), samples)


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
    with monkeypatch.context() as patched:
        reads = Reads(path, patched)
        source.window = 2
        for samples in requests(4000, source.block, 2, together=20):
            found = source.gather(samples, KEY)
            assert torch.equal(found[0][:, 1], torch.from_numpy(images[samples, 1]))
            assert torch.equal(found[1], torch.from_numpy(samples))
        assert source.block == 50
        assert set(reads.taken().values()) == {1}
    assert capsys.readouterr().err == ""
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("images", (4000, 6000), "uint8", chunks=(50, 6000))
        file.create_dataset("others", (4000, 6000), "uint8", chunks=(401, 6000))
    assert H5Source(tmp_path / "b.h5").block == 401
    assert "images" in capsys.readouterr().err  # its chunks lie in two blocks, and are read twice


def test_columns_come_as_they_are_asked_for(small):
    samples = numpy.array([330, 0, 17, 17])
    expected = {"images": IMAGES[samples].tolist(), "labels": LABELS[samples].tolist()}
    for names in (("images", "labels"), ("labels", "images"), ("images",)):
        found = H5Source(small, names).gather(samples, KEY)
        assert [column.tolist() for column in found] == [expected[name] for name in names]


def test_numbers_of_every_type_and_shape_come_as_they_are(tmp_path):
    chance, columns = numpy.random.default_rng(1), {}
    types = "bool uint8 int8 >u2 <i2 >i4 uint32 >u8 int64 float16 >f4 float64 complex64"
    for dtype in types.split():
        for shape in ((), (3,), (2, 0), (0, 2)):
            values = chance.integers(0, 2, (50, *shape)).astype(dtype)
            stored = {"chunks": (7, *shape)} if values.size else {}
            columns[f"{dtype} {shape}"] = values, stored
    source = H5Source(write(tmp_path / "a.h5", **columns), list(columns), block_bytes=1)
    source.window = 1
    for samples in (numpy.array([49, 3]), numpy.arange(50)):
        found = source.gather(samples, KEY)
        for column, (values, _) in zip(found, columns.values(), strict=True):
            assert column.dtype == getattr(torch, values.dtype.name)
            assert numpy.array_equal(column.numpy(), values[samples])


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
    assert copy.copy(source)._readers == {}

    def child():
        for piece in pieces:
            check(source.gather(piece, KEY), piece)
        assert len(source._readers) == 2

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    for piece in pieces:
        check(source.gather(piece, KEY), piece)
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(("world", "start"), [(1, 0), (2, 5)])
def test_a_training_reads_ahead_from_the_file_what_it_would_read_from_memory(small, world, start):
    settings = RunConfig(epochs=2, batch=BatchConfig(24, lanes=6), read=ReadConfig(window=3))
    for rank in range(world):
        source = open_dataset(str(small), settings)
        batches = Batches(source, settings, World(rank=rank, size=world))
        order = Order(SIZE, source.block, 3)
        count = start
        for step in batches.steps(start):
            for lane, planned in zip(step.lanes, step.plan.lanes, strict=True):
                places = numpy.array(planned.places, dtype=numpy.int64)
                check(lane.batch, order.at(places, settings.seed, step.plan.epoch))
            count += 1
        assert count == batches.total_steps == 28


def test_threads_may_read_at_the_same_time(small):
    source = H5Source(small, block_bytes=1)
    source.window = 2
    pieces = list(requests(SIZE, 16, 2, together=1))
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda piece: source.gather(piece, KEY), pieces)
        for piece, columns in zip(pieces, found, strict=True):
            check(columns, piece)


def test_chunks_with_a_part_of_each_sample_are_read_once_and_told_of(tmp_path, monkeypatch, capsys):
    images = numpy.random.default_rng(0).integers(0, 255, (2000, 28, 28), dtype="uint8")
    path = write(
        tmp_path / "a.h5",
        images=(images, {"chunks": (250, 7, 14)}),
        labels=(numpy.arange(2000), {"chunks": (250,)}),
    )
    source = H5Source(path, block_bytes=1)
    H5Source(path, block_bytes=1)
    (said,) = capsys.readouterr().err.splitlines()
    for words in ("images", "8 chunks", "250 times", "chunks=(1337, 28, 28)", f"pack {path}"):
        assert words in said
    reads = Reads(path, monkeypatch)
    for samples in requests(2000, source.block, 16, together=20):
        assert torch.equal(source.gather(samples, KEY)[0], torch.from_numpy(images[samples]))
    assert Counter(reads.taken().values()) == {1: 8 * 8 + 8}


def test_what_cannot_be_read_in_bounded_memory_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (1_281_167, 224, 224, 3), "uint8", chunks=True)
        file.create_dataset("one", (2, 1 << 30), "uint8")
        file.create_dataset("long", (1 << 40, 1 << 10), "uint8", chunks=(1 << 10, 1 << 10))
    with pytest.raises(DataError, match=r"(?s)images.*20,019 samples.*chunks="):
        H5Source(path, ["images"])
    with pytest.raises(DataError, match=r"1 samples .* 1\.1 GB"):
        H5Source(path, ["one"])
    assert len(inspect(path)) == 3
    source = H5Source(path, ["long"])
    assert source.gather(numpy.array([(1 << 40) - 1]), KEY)[0].shape == (1, 1 << 10)
    source.window = 1 << 28
    with pytest.raises(ConfigError, match=r"(?s)GB.*read\.window=\d+"):
        source.gather(numpy.array([0]), KEY)


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
        (lambda file: file.create_dataset("x", data=h5py.Empty("f")), "single value", "columns="),
        (lambda file: file.create_dataset("x", data=["a", "bc"]), "text", "paceline data pack"),
        (lambda file: file.create_dataset("x", (3,), h5py.vlen_dtype("i4")), "length", "data pack"),
        (lambda file: file.create_dataset("x", (3,), "S5"), "S5", "numbers of a fixed width"),
        (lambda file: file.create_dataset("x", (3,), [("a", "i4")]), "not a number", "columns="),
        (lambda file: file.create_dataset("x", (3,), h5py.ref_dtype), "x", "columns="),
        (link_out, "leads out of the file", "into one file"),
        (link_in_circles, "leads out of the file", "into one file"),
        (virtual, "other files", "into one file"),
        (stored_elsewhere, "other files", "into one file"),
        (unknown_filter, "filter 32845", "hdf5plugin"),
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
    with pytest.raises(DataError, match="number of samples|" + problem):
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
    (tmp_path / "text.h5").write_text("no HDF5, though it says so")
    (tmp_path / "cut.h5").write_bytes(small.read_bytes()[:-1000])
    (tmp_path / "empty.h5").touch()
    os.mkfifo(tmp_path / "pipe")
    cases = {"none.h5": "no file", ".": "no file", "pipe": "no file", "cut.h5": "truncated"}
    cases |= dict.fromkeys(["text.h5", "empty.h5"], "HDF5")
    for name, problem in cases.items():
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
        with pytest.raises(DataError, match=r"labels of .*a\.h5, rows 16 to 31"):
            source.gather(numpy.array([17]), KEY)
        good = numpy.array([1, 40])
        check(source.gather(good, KEY), good)


def test_a_file_that_has_changed_is_not_read_on(small):
    with small.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is being written"):
            H5Source(small)
    source = H5Source(small)
    write(small, images=IMAGES[:-1], labels=LABELS[:-1])
    with pytest.raises(DataError, match="has changed"):
        source.gather(numpy.array([1]), KEY)


def test_a_file_system_without_locks_will_do(small, monkeypatch):
    real = h5py.File

    def without_locks(path, mode, *, locking=None, **settings):
        if locking is None:
            raise OSError("Unable to open file (unable to lock file, errno = 37)")
        return real(path, mode, locking=locking, **settings)

    monkeypatch.setattr(h5py, "File", without_locks)
    check(H5Source(small).gather(numpy.array([13]), KEY), [13])


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
