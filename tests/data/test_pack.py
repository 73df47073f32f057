"""Whatever is packed comes out again, whoever packs it, however often it is interrupted; what cannot be packed is named."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import h5py
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.data.pack import PackRequest, pack, pack_samples, plan, pool, text_tasks
from paceline.data.pack import optional_packages as extras
from paceline.data.pack.plan import PLAN, SPOOL
from paceline.data.shards.check import check_dataset, open_index
from paceline.data.shards.store import LocalShardStore
from paceline.errors import ConfigError, DataError, EnvironmentUnfit, PacelineError
from support import packable
from support.packable import IMAGES, KINDS, LABELS, alike, content, read_back
from support.program import paceline, started, wait_for

SMALL = 90  # bytes of a shard: several of them, whatever is packed


def heavy(*values: object) -> list[object]:
    return [pytest.param(value, marks=pytest.mark.heavy) for value in values]


def smaller(request: PackRequest, shard_bytes: int = SMALL) -> PackRequest:
    return PackRequest(**vars(request) | {"shard_bytes": shard_bytes})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_packed_is_read_back_with_plain_safetensors(kind, source, tmp_path):
    example = kind(source)
    out = tmp_path / "out"
    index = pack(smaller(example.request), out, workers=1)
    alike(read_back(out), example.columns)
    assert index == LocalShardStore(out).index()
    assert len(index.shards) > 1
    assert {name: index.about[name] for name in example.about} == example.about
    verdict = check_dataset(out)
    assert (verdict.problems, verdict.strays) == ([], [])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert (stat.S_IMODE(out.stat().st_mode), modes) == (0o700, {0o600})


@pytest.mark.parametrize(
    "name", ["tokens", *heavy("npz", "hdf5", "images", "characters", "parquet")]
)
def test_the_number_of_workers_changes_no_byte(name, source, tmp_path, monkeypatch):
    monkeypatch.setattr(text_tasks, "_PART_BYTES", 40)  # so that texts are shared, too
    request = smaller(getattr(packable, name)(source).request)
    pack(request, tmp_path / "alone", workers=1)
    pack(request, tmp_path / "shared", workers=2)
    assert content(tmp_path / "alone") == content(tmp_path / "shared")
    assert check_dataset(tmp_path / "shared").ok


@pytest.mark.heavy
def test_workers_import_no_torch() -> None:
    script = "import sys, paceline.data.pack.worker, paceline.data.shards.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("shard_bytes", [1, 20, 28, 57, 10_000])
def test_a_shard_has_about_the_bytes_that_were_asked_for_and_at_least_one_sample(
    shard_bytes: int, source: Path, tmp_path: Path
) -> None:
    index = pack(smaller(packable.npz(source).request, shard_bytes), tmp_path / "out", workers=1)
    assert index.samples_per_shard == max(1, shard_bytes // 28)
    assert [shard.samples for shard in index.shards[:-1]] == [index.samples_per_shard] * (
        len(index.shards) - 1
    )


class Killed(BaseException):
    """The process would end here."""


@pytest.mark.parametrize("name", ["tokens", *heavy("npy", "idx", "csv")])
@pytest.mark.parametrize("leftover", [False, True], ids=["before it is named", "after it is named"])
def test_a_pack_that_is_interrupted_at_any_file_goes_on_to_the_same_bytes(
    name: str, leftover: bool, source: Path, tmp_path: Path, monkeypatch
) -> None:
    request = smaller(getattr(packable, name)(source).request, 300)
    pack(request, tmp_path / "whole", workers=1)
    wanted, replace = content(tmp_path / "whole"), Path.replace
    for survived in itertools.count():
        out, calls = tmp_path / f"out{survived}", itertools.count()

        def replace_until_killed(self: Path, target: Path) -> Path:
            if last := next(calls) == survived:  # noqa: B023
                assert not (out / "index.json").exists()  # noqa: B023
            if leftover or not last:
                replace(self, target)
            if last:
                raise Killed
            return target

        monkeypatch.setattr(Path, "replace", replace_until_killed)
        try:
            pack(request, out, workers=1)
            break
        except Killed:
            monkeypatch.setattr(Path, "replace", replace)
        if not (leftover and (out / "index.json").exists()):
            with pytest.raises(DataError, match="is not a dataset|unfinished"):
                open_index(out)
            with pytest.raises(DataError, match="is not a dataset"):
                LocalShardStore(out).index()
        pack(request, out, workers=1)
        assert content(out) == wanted, survived
    assert survived > len(wanted)


HELD = """
import pathlib, time
from paceline.data.pack import plan

def note(self, facts, note=plan.Journal.note):
    note(self, facts)
    if len(self.finished) == {finished}:
        pathlib.Path("held").touch()
        time.sleep(600)

plan.Journal.note = note
"""


@pytest.mark.parametrize("finished", [40, *heavy(1)])
def test_a_pack_that_is_killed_goes_on_to_the_same_bytes(finished: int, tmp_path: Path) -> None:
    numpy.save(
        tmp_path / "x.npy", numpy.random.default_rng(3).integers(0, 255, (150, 100), dtype="uint8")
    )
    words = ["data", "pack", "x.npy", "--shard", "100", "--workers", "2", "--to"]
    pack(PackRequest((str(tmp_path / "x.npy"),), 100), tmp_path / "whole", workers=1)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(HELD.format(finished=finished))
    env = {"PYTHONPATH": str(tmp_path / "first")}
    with started(*words, "out", folder=tmp_path, env=env, cold=True) as running:
        wait_for(tmp_path / "held")
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        assert running.left_over() == []
    with pytest.raises(DataError, match="unfinished") as error:
        open_index(tmp_path / "out")
    assert "repeat the command" in error.value.fix
    for path in (tmp_path / "out").glob("*.safetensors"):
        os.utime(path, (1, 1))
    done = paceline(*words, "out", folder=tmp_path)
    assert done.code == 0, done
    kept = [path for path in (tmp_path / "out").iterdir() if path.stat().st_mtime == 1]
    assert len(kept) >= finished
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def interrupted(request: PackRequest, out: Path, shards: int, monkeypatch) -> None:
    """Pack some shards, and no more."""
    with monkeypatch.context() as patch:
        note = plan.Journal.note

        def note_until_killed(self, facts) -> None:
            note(self, facts)
            if len(self.finished) == shards:
                raise Killed

        patch.setattr(plan.Journal, "note", note_until_killed)
        with pytest.raises(Killed):
            pack(request, out, workers=1)


def test_only_shards_that_are_whole_are_kept(source: Path, tmp_path: Path, monkeypatch) -> None:
    request, out = smaller(packable.npz(source).request, 28), tmp_path / "out"
    pack(request, tmp_path / "whole", workers=1)
    interrupted(request, out, 6, monkeypatch)
    damaged, gone, kept = (out / f"{number:05d}.safetensors" for number in range(3))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    gone.unlink()
    (out / ".00009.safetensors.0123abcd").write_bytes(b"half a shard")
    with (out / PLAN).open("a") as file:
        file.write('{"name": "0000')
    for path in (damaged, kept):
        os.utime(path, (1, 1))
    pack(request, out, workers=1)
    assert [path.stat().st_mtime == 1 for path in (damaged, gone, kept)] == [False, False, True]
    assert content(out) == content(tmp_path / "whole")


def test_another_plan_in_the_folder_is_refused(source: Path, tmp_path: Path, monkeypatch) -> None:
    request, out = smaller(packable.npz(source).request, 28), tmp_path / "out"
    interrupted(request, out, 3, monkeypatch)
    before = content(out)
    for other in (smaller(request, 57), PackRequest(**vars(request) | {"columns": ("image",)})):
        with pytest.raises(
            ConfigError, match="unfinished pack of another input, with other options"
        ) as error:
            pack(other, out, workers=1)
        assert "--force" in error.value.fix
    os.utime(source / "x.npz", (1, 1))
    with pytest.raises(ConfigError, match="files that have changed"):
        pack(request, out, workers=1)
    assert content(out) == before
    pack(smaller(request, 57), out, workers=1, force=True)
    pack(smaller(request, 57), tmp_path / "whole", workers=1)
    assert content(out) == content(tmp_path / "whole")


def test_a_pack_that_failed_before_its_first_shard_is_in_nobodys_way(source, tmp_path):
    (source / "x.csv").write_text("a\n1\nx\n")
    request = PackRequest((str(source / "x.csv"),))
    with pytest.raises(DataError, match="is numeric, but row .* has 'x'"):
        pack(request, tmp_path / "out", workers=1)
    (source / "x.csv").write_text("a\n1\n2\n")
    pack(request, tmp_path / "out", workers=1)
    alike(read_back(tmp_path / "out"), {"a": numpy.array([1, 2])})


def test_a_whole_set_is_written_over_with_force_only(source, tmp_path, monkeypatch):
    request, out = smaller(packable.npz(source).request, 28), tmp_path / "out"
    with monkeypatch.context() as patch:  # killed when only tidying was left
        patch.setattr(plan.Journal, "end", lambda self: None)
        pack(request, out, workers=1)
    assert [name.split()[0] for name in check_dataset(out).strays] == [PLAN, SPOOL]
    pack(request, out, workers=1)
    assert check_dataset(out).strays == []
    (out / "README").write_text("mine\n")
    with pytest.raises(ConfigError, match="already contains a dataset") as error:
        pack(smaller(request, 57), out, workers=1)
    assert "--force" in error.value.fix
    index = pack(smaller(request, 57), out, workers=1, force=True)
    assert len(list(out.glob("*.safetensors"))) == len(index.shards) == 10
    assert check_dataset(out).strays == ["README"]


def test_a_folder_that_cannot_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    request, out = packable.npz(source).request, tmp_path / "out"
    with plan.locked_folder(out), pytest.raises(ConfigError, match="another process"):
        pack(request, out)
    (out / "00000.safetensors").write_bytes(b"weights")  # of unknown origin
    with pytest.raises(ConfigError, match=r"00000\.safetensors"):
        pack(request, out)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentUnfit, match="file"):
        pack(request, tmp_path / "file")
    with pytest.raises(ConfigError, match="inside the input"):
        pack(packable.images(source).request, source / "out")


def test_an_input_that_changes_meanwhile_is_noticed(source: Path, tmp_path: Path) -> None:
    request = packable.npz(source).request
    with pytest.raises(DataError, match="changed while it was packed"):
        pack(
            request,
            tmp_path / "out",
            workers=1,
            progress=lambda *_: os.utime(source / "x.npz", (1, 1)),
        )
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_worker_that_dies_is_told_of(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pool, "_WORKER", "paceline.version")
    with pytest.raises(EnvironmentUnfit, match="a worker died with exit code -?\\d+") as error:
        pack(smaller(packable.npz(source).request), tmp_path / "out", workers=2)
    assert "repeat the command to resume" in error.value.fix


def save_array(**arrays):
    def make(folder: Path) -> None:
        for name, array in arrays.items():
            numpy.save(folder / f"{name}.npy", array)

    return make


def write(**files):
    def make(folder: Path) -> None:
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def deep_image(folder: Path) -> None:
    (folder / "a").mkdir()
    Image.fromarray(numpy.zeros((4, 4), dtype="uint16")).save(folder / "a" / "deep.png")


def outside_hdf5(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", (4,), dtype="u1", external=[("/etc/hostname", 0, 4)])


def uneven_hdf5(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file["a"], file["b"] = LABELS, LABELS[:3]


def tables(**columns):
    def make(folder: Path) -> None:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet")

    return make


def truncated(folder: Path) -> None:
    numpy.save(folder / "x.npy", IMAGES)
    os.truncate(folder / "x.npy", 300)


def parts_npz(folder: Path) -> None:
    numpy.savez(folder / "x.npz", x_train=LABELS, x_test=LABELS)


def broken_npz(folder: Path) -> None:
    numpy.savez_compressed(folder / "x.npz", image=IMAGES)
    whole = bytearray((folder / "x.npz").read_bytes())
    whole[60] ^= 255
    (folder / "x.npz").write_bytes(whole)


def odd_idx(folder: Path) -> None:
    packable.idx(folder)
    (folder / "t10k-labels-idx1-ubyte.gz").rename(folder / "t10k-labels-idx1-ubyte.gz.part")


NOTHING = write()
BAD = [
    # what there is, what is asked for, the error, what it says, and its fix
    (save_array(x=LABELS), ["y.npy"], {}, DataError, "there is no .*y.npy", r"did you mean .*x\.npy\?"),
    (write(x_pkl="?"), ["x.pkl"], {}, ConfigError, "cannot pack .*x.pkl", "arrays: x.npy.*HDF5.*CSV.*Parquet.*text.*MNIST.*images"),
    (NOTHING, ["."], {}, ConfigError, "the folder is empty", "use one of these inputs"),
    (write(a_png="?"), ["."], {}, ConfigError, "its images are not in class folders", "images: a folder of CLASS/x.png"),
    (save_array(x=LABELS[:0]), ["x.npy"], {}, DataError, "x.npy contains no samples", "not empty"),
    (save_array(x=LABELS, y=LABELS[:3]), ["x.npy", "y.npy"], {}, DataError, "different lengths: x 20, y 3", "equal length"),
    (save_array(x=numpy.array([None, 1])), ["x.npy"], {}, DataError, "x.npy: x contains Python objects, which are never unpickled", "array of numbers"),
    (save_array(x=numpy.array(["a", "b"])), ["x.npy"], {}, DataError, "x.npy: x has type <U1, which a shard cannot store", "convert it to one of: float64"),
    (save_array(x=numpy.float32(3)), ["x.npy"], {}, DataError, "x is a scalar, not rows", "--columns"),
    (save_array(x=LABELS), ["x.npy"], {"columns": ("z",)}, ConfigError, "x.npy has no column z", "use one of: x"),
    (save_array(x=LABELS), ["x.npy"], {"columns": ("x", "x")}, ConfigError, "names a column twice", "once"),
    (save_array(x=LABELS), ["x.npy"], {"grey": True}, ConfigError, "--grey does not apply to arrays", "remove it; arrays accepts --columns"),
    (save_array(x=LABELS), ["x.npy", "x=x.npy"], {}, ConfigError, "two columns are named x", "NAME=FILE.npy"),
    (write(x_npy="no array"), ["x.npy"], {}, DataError, "cannot read .*x.npy as arrays", "numpy.save"),
    (parts_npz, ["x.npz"], {}, ConfigError, "several parts: train .x_train., test .x_test.", "--columns x_train"),
    (broken_npz, ["x.npz"], {}, DataError, "cannot read .*x.npz as arrays", "savez"),
    (truncated, ["x.npy"], {}, DataError, "x.npy is truncated: x needs 400 bytes, 172 are left", "again"),
    (odd_idx, ["."], {"part": "test"}, DataError, "one file of labels for --part test, found none", "t10k-labels-idx1-ubyte.gz"),
    (odd_idx, ["."], {}, DataError, "one file of images for --part train, found none", "another --part"),
    (uneven_hdf5, ["x.h5"], {"columns": ("a", "b")}, DataError, "x.h5: columns of different lengths: a 20, b 3", "--columns"),
    (outside_hdf5, ["x.h5"], {}, DataError, "x.h5", "copy the data into one file"),
    (write(x_h5="no file"), ["x.h5"], {}, DataError, "cannot read .*x.h5 as HDF5", "again"),
    (write(a__x_png="no image"), ["."], {"size": (4, 4)}, DataError, "a/x.png cannot be read as an image", "remove that file"),
    (write(a__x_png="no image"), ["."], {"grey": True}, ConfigError, "--grey needs decoded images", "--size 28x28"),
    (write(a__x_png="", b__x_txt=""), ["."], {}, DataError, "^b contains no image", "remove that folder"),
    (deep_image, ["."], {"size": (4, 4)}, DataError, "deep.png has more than 8 bits per pixel", "without --size"),
    (write(x_txt=""), ["x.txt"], {}, DataError, "x.txt contains no text", "not empty"),
    (write(x_txt="abc"), ["x.txt"], {"length": 3}, DataError, "x.txt has 3 bytes, one row needs 4", "--length 2 or less"),
    (write(x_txt="abc"), ["x.txt"], {"text": "tokens"}, ConfigError, "--as tokens needs a tokenizer", "--train-tokenizer VOCAB"),
    (write(x_txt="abc"), ["x.txt"], {"text": "bytes", "train_tokenizer": 300}, ConfigError, "a tokenizer does not apply to --as bytes", "remove the tokenizer"),
    (write(x_txt="abc"), ["x.txt"], {"tokenizer": "x.txt", "train_tokenizer": 300}, ConfigError, "two tokenizers", "one of them"),
    (write(x_txt="abc"), ["x.txt"], {"train_tokenizer": 100}, ConfigError, "--train-tokenizer must be at least 257 .*, got 100", "257 or more"),
    (write(x_txt="abc"), ["x.txt"], {"tokenizer": "x.txt"}, DataError, "cannot read .*x.txt as a tokenizer", "tokenizer.json"),
    (write(x_txt=b"abc\n\xff"), ["x.txt"], {"text": "characters"}, DataError, "x.txt is not UTF-8 text: byte 4 is 0xff", "--as bytes"),
    (write(x_csv="a,b\n1,2\n3\n"), ["x.csv"], {}, DataError, "cannot read .*x.csv as CSV: .*Expected 2 columns, got 1", "correct that line"),
    (write(x_csv="a,b\n1,2\n3,x\n"), ["x.csv"], {}, DataError, "x.csv: b is numeric, but row 2 has 'x'", "correct that cell"),
    (write(x_csv="a,b\n1,2\n,3\n"), ["x.csv"], {}, DataError, "x.csv: a is numeric, but row 2 has an empty cell", "--columns"),
    (write(x_csv="1,2\n3,4\n"), ["x.csv"], {}, DataError, "the first line of .*x.csv contains numbers, not column names", "first line with the names"),
    (write(a_csv="a,b\n1,2\n", b_csv="a,c\n1,2\n"), ["."], {}, DataError, "b.csv has columns a, c, the first file a, b", "separately"),
    (tables(a=[1, None, 3]), ["x.parquet"], {}, DataError, "x.parquet: a has an empty cell in or after row 2", "fill or remove"),
    (tables(a=[pyarrow.scalar(0, pyarrow.timestamp("ms"))]), ["x.parquet"], {}, DataError, r"x.parquet: a has type timestamp\[ms\]", "--columns"),
    (write(x_parquet="no table"), ["x.parquet"], {}, DataError, "cannot read .*x.parquet as Parquet", "again"),
    (write(x_csv="a\n1\n", y_txt="text"), ["x.csv", "y.txt"], {}, ConfigError, "inputs are of several kinds: CSV, text", "separately"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words", "options", "kind", "problem", "fix"), BAD)
def test_what_cannot_be_packed_is_refused_with_its_file_and_a_fix(
    make, words, options, kind, problem, fix, source: Path, tmp_path: Path, monkeypatch
) -> None:
    make(source)
    monkeypatch.chdir(source)
    with pytest.raises(PacelineError) as error:
        pack(PackRequest(tuple(words), **options), tmp_path / "out", workers=1)
    assert type(error.value) is kind
    assert re.search(problem, error.value.problem), error.value
    assert re.search(fix, error.value.fix, re.DOTALL), error.value
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_is_wrong_is_said_by_workers_as_well(source: Path, tmp_path: Path) -> None:
    packable.images(source)
    (source / "dogs" / "1.png").write_text("no image")
    with pytest.raises(DataError, match="dogs/1.png cannot be read as an image") as error:
        pack(PackRequest((str(source),), 100, size=(4, 4)), tmp_path / "out", workers=2)
    assert error.value.fix == "remove that file, or create or download it again"


@pytest.mark.parametrize(
    ("kind", "package", "name"), [("images", "PIL", "pillow"), ("csv", "pyarrow", "pyarrow")]
)
def test_a_package_that_is_missing_is_named_as_it_is_installed(
    kind: str, package: str, name: str, source: Path, tmp_path: Path, monkeypatch
) -> None:
    request = getattr(packable, kind)(source).request

    def find_nothing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(extras.importlib, "import_module", find_nothing)
    with pytest.raises(EnvironmentUnfit, match=package) as error:
        pack(request, tmp_path / "out", workers=1)
    assert error.value.fix == f"pip install {name}"


def test_a_tokenizer_is_trained_on_the_spot_and_kept_in_the_set(source, tmp_path):
    from tokenizers import Tokenizer

    index = pack(packable.texts(source, train_tokenizer=280, length=4), tmp_path / "out", workers=1)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    rows = read_back(tmp_path / "out")["tokens"]
    flat = [*rows[:, :-1].reshape(-1).tolist(), rows[-1, -1].item()]
    texts = tokenizer.decode(flat, skip_special_tokens=False).split("<|endoftext|>")
    assert texts[:2] == list(packable.TEXTS.values())[:2]
    assert index.about["vocabulary"] == tokenizer.get_vocab_size() <= 280


@settings(max_examples=15)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5), st.integers(1, 6))
def test_neighbouring_rows_share_one_element_and_nothing_but_a_tail_is_lost(
    tmp_path_factory, documents: list[bytes], length: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "in").mkdir()
    for number, document in enumerate(documents):
        (folder / "in" / f"{number}.txt").write_bytes(document)
    joined = b"".join(documents)
    request = PackRequest((str(folder / "in"),), 2 * length, length=length)
    if len(joined) <= length:
        with pytest.raises(DataError, match="one row needs|contains no text"):
            pack(request, folder / "out", workers=1)
        return
    pack(request, folder / "out", workers=1)
    rows = read_back(folder / "out")["tokens"]
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    again = rows[:, :-1].tobytes() + rows[-1, -1:].tobytes()
    assert joined.startswith(again)
    assert len(joined) - len(again) < length
    shutil.rmtree(folder)


def test_a_long_text_is_cut_where_its_tokens_are_the_same(source, tmp_path, monkeypatch):
    _, path = packable.tokenizer_file(source)
    text = "".join(f"Line {n}\n{'  indented' * (n % 3)}\n\n" for n in range(60))
    (source / "x.txt").write_text(text)
    request = PackRequest((str(source / "x.txt"),), tokenizer=str(path))
    pack(request, tmp_path / "whole", workers=1)
    monkeypatch.setattr(text_tasks, "_PART_BYTES", 50)
    assert len(text_tasks.tasks_of([source / "x.txt"])) > 10
    pack(request, tmp_path / "cut", workers=1)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_samples_of_a_program_are_packed(tmp_path):
    wanted = {
        "pixels": IMAGES,
        "name": packable.encoded([f"n{'é' * n}" for n in range(20)]),
        "steps": [numpy.arange(n) for n in range(20)],
        "raw": [numpy.zeros(n % 3, dtype="uint8") for n in range(20)],
        "label": LABELS,
    }
    samples = [{name: values[n] for name, values in wanted.items()} for n in range(20)]
    for n, sample in enumerate(samples):
        sample |= {"name": f"n{'é' * n}", "raw": b"\0" * (n % 3), "steps": list(range(n))}
        sample |= {"label": int(sample["label"])}
    index = pack_samples(iter(samples), tmp_path / "out", shard_bytes=300, about={"by": "a test"})
    alike(read_back(tmp_path / "out"), wanted)
    assert index == open_index(tmp_path / "out")
    assert (check_dataset(tmp_path / "out").ok, index.about) == (True, {"by": "a test"})
    assert len(index.shards) > 3
    with pytest.raises(ConfigError, match="already contains a dataset"):
        pack_samples(iter(samples), tmp_path / "out")


def test_samples_of_a_program_that_was_interrupted_are_packed_anew(tmp_path: Path) -> None:
    def numbers(count: int):
        yield from ({"x": n} for n in range(100))
        if count < 200:
            raise Killed
        yield from ({"x": n} for n in range(100, count))

    with pytest.raises(Killed):
        pack_samples(numbers(100), tmp_path / "out", shard_bytes=80)
    with pytest.raises(DataError, match="unfinished"):
        open_index(tmp_path / "out")
    pack_samples(numbers(200), tmp_path / "out", shard_bytes=80)
    alike(read_back(tmp_path / "out"), {"x": numpy.arange(200)})
    assert check_dataset(tmp_path / "out").strays == []


@pytest.mark.parametrize(
    ("samples", "problem", "fix"),
    [
        ([], "no samples", "at least one"),
        ([{"x": 1}] * 70 + [{"x": 0.5}], r"sample 70.*x is float64 \(\).*int64", "the first"),
        ([{"x": [1, 2]}] * 70 + [{"x": [1]}], r"sample 70.*\(1,\).*\(2,\)", r"varying=\['x'\]"),
        ([{"x": [[1]]}, {"x": [[1, 2]]}], r"sample 1.*\(1, 2\)", "the first"),
        ([{"x": 1, "y": 2}, {"x": 1}], "no column y", "same columns"),
        ([{"x": 1}, {"x": 1, "y": 2}], "sample 1 has columns x, y", "same columns"),
        ([{"x": None}], "x contains Python objects", "array of numbers"),
        ([{"__x": 1}], "'__x'", "pack"),
    ],
)
def test_samples_that_are_not_alike_are_refused(samples, problem, fix, tmp_path):
    with pytest.raises(PacelineError, match=problem) as error:
        pack_samples(samples, tmp_path / "out", shard_bytes=100)
    assert re.search(fix, error.value.fix)
    assert not (tmp_path / "out" / "index.json").exists()


def test_what_is_known_besides_must_be_json_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="about= cannot be written as JSON"):
        pack_samples([{"x": 1}], tmp_path / "out", about={"by": object()})
    assert not (tmp_path / "out").exists()
    assert pack_samples([{"x": 1}], tmp_path / "out", about={1: (2,)}) == open_index(
        tmp_path / "out"
    )


def test_lengths_may_vary_where_that_is_said(tmp_path: Path) -> None:
    samples = [{"x": [1, 2]}] * 70 + [{"x": [1]}]
    pack_samples(samples, tmp_path / "out", varying=["x"])
    alike(read_back(tmp_path / "out"), {"x": [numpy.array(sample["x"]) for sample in samples]})
