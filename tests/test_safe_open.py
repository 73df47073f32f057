"""Files that somebody else may have made: what is not a plain file is refused at once, wherever it is read or written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoint.find import find_catalog
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.storage import read_manifest
from paceline.cluster.batch import BatchJob
from paceline.config import RunConfig
from paceline.config.parse import config_from_words, settings_from_file
from paceline.data.shards.store import LocalShardStore
from paceline.errors import ConfigError, PacelineError
from paceline.events import EventLog
from paceline.hang.script_dumps import RankDump, _read
from paceline.launch.failure import RankEnd
from paceline.measure.trace import read_traces
from paceline.report.history import History
from paceline.report.page.event_columns import read_event_columns
from paceline.rundir import RunDir
from paceline.runlock import claimed, is_held
from paceline.safe_open import UnsafeFile, open_to_write, read_bytes
from paceline.telemetry.stragglers import read_beats
from paceline.verify.records import RECORD_FILE, read_record


def put_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as plug:
            plug.bind(path.name)
    finally:
        os.chdir(here)


def put_link_out(path: Path) -> None:
    other = path.parents[2] / "other"
    other.write_text("not yours")
    path.symlink_to(other)


PLANTED: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": put_socket,
    "link out": put_link_out,
    "folder": Path.mkdir,
    "8 TiB": lambda path: (path.touch(), os.truncate(path, 1 << 43)),
}


def lock(path: Path) -> None:
    assert not is_held(path)
    with claimed(path, patience_s=0):
        pass


def events(path: Path) -> None:
    History(path).read()
    read_event_columns(path)
    with EventLog(path):
        pass


READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "manifest": (
        "step-000000008/manifest.json",
        lambda path: read_manifest(LocalStorage(path.parents[1]), 8),
    ),
    "config": ("run/config.toml", lambda path: find_catalog(str(path.parent))),
    "settings": ("run/given.toml", settings_from_file),
    "record": (f"run/{RECORD_FILE}", lambda path: read_record(path.parent, "run")),
    "index": ("set/index.json", lambda path: LocalShardStore(path.parent).index()),
    "side file": (
        "set/tokenizer.json",
        lambda path: LocalShardStore(path.parent).read_file("tokenizer.json"),
    ),
    "lock": ("run/lock", lock),
    "events": ("run/events.jsonl", events),
    "dump of a rank": (
        "run/0000.stacks",
        lambda path: _read(path.with_suffix("")),
    ),
    "answer of a rank": ("run/0000.answer", lambda path: _read(path.with_suffix(""))),
    "report of a rank": ("run/failure.json", lambda path: RankEnd.read(0, 1, 0.0, path, ())),
    "profile": ("run/rank-0000.json", lambda path: read_traces(path.parent)),
    "beat": ("ranks/0000.beat", lambda path: read_beats(path.parent, 1, 0.0)),
}


NOTHING: dict[str, object] = {
    "beat": [],
    "dump of a rank": RankDump(()),
    "answer of a rank": RankDump(()),
    "report of a rank": RankEnd(0, 1, 0.0),
}
"""What readers return that leave such a file out."""


@pytest.mark.parametrize("kind", READ)
def test_what_is_not_a_plain_file_is_refused_at_once(kind, tmp_path: Path) -> None:
    name, use = READ[kind]
    for planted, plant in PLANTED.items():
        here = tmp_path / planted
        path = here / "here" / name
        path.parent.mkdir(parents=True)
        plant(path)
        if planted == "8 TiB" and kind in {"lock", "events", "dump of a rank"}:
            continue  # these are appended to, or replaced, and never read as a whole
        if kind == "config":
            with contextlib.suppress(PacelineError):  # else it is no run, only a folder
                use(path)
        elif kind in NOTHING:
            assert use(path) == NOTHING[kind], planted
        else:  # with a link out, "settings" and "index" are named by the user: it is followed
            followed = planted == "link out" and kind in {"settings", "index"}
            with pytest.raises(PacelineError if followed else (PacelineError, UnsafeFile)):
                use(path)
        assert not (here / "other").exists() or (here / "other").read_text() == "not yours"


LOOKALIKES = ["step-0000000099", "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669\u0669", "step-+00000099", "step-000000099\n"]  # fmt: skip


def test_a_folder_that_only_looks_like_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    for folder in ("step-000000008", *LOOKALIKES):
        (tmp_path / folder).mkdir()
    assert LocalStorage(tmp_path).steps() == [8]


def test_a_planted_link_is_not_written_through_and_a_new_file_is_private(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (tmp_path / "file").symlink_to(other)
    with pytest.raises(UnsafeFile, match="a symbolic link"):
        open_to_write(tmp_path / "file", os.O_WRONLY | os.O_TRUNC)
    assert not other.exists()
    before = os.umask(0)
    try:
        os.close(open_to_write(other, os.O_WRONLY))
    finally:
        os.umask(before)
    assert other.stat().st_mode & 0o777 == 0o600


def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path: Path) -> None:
    for name in ("checkpoints", "ranks", "hang", "jobs", "csv", "tensorboard"):
        run = tmp_path / f"with {name}"
        run.mkdir()
        (run / name).symlink_to(tmp_path)
        with pytest.raises(PacelineError, match=name) as caught:
            RunDir(run).refuse_links()
        assert "checkpoint.to" in caught.value.fix


def test_a_file_that_grows_while_it_is_read_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(UnsafeFile, match="5 bytes.* 4"):
        read_bytes(tmp_path / "file", 4)


def test_reading_a_run_folder_connects_nowhere(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "x"\n[checkpoint]\nto = "s3://bucket/runs"\n')
    with pytest.raises(ConfigError, match="s3://bucket/runs/x") as caught:
        find_catalog(str(tmp_path))
    assert "paceline ckpt list s3://bucket/runs/x" in caught.value.fix


def test_an_address_with_a_password_is_refused_in_every_setting() -> None:
    config_from_words(RunConfig, ["name=s3:password"])
    for word in ("record.to=sftp://me:pw@host/x", "runs=s3://key:12/x@bucket"):
        with pytest.raises(ConfigError, match="user name or password") as caught:
            config_from_words(RunConfig, [word])
        assert "pw@" not in str(caught.value)


@dataclasses.dataclass(frozen=True)
class WithToken(RunConfig):
    hub_token: str = ""
    label_key: str = "label"


def test_a_secret_is_given_by_the_name_of_a_variable() -> None:
    assert config_from_words(WithToken, ["hub_token=HUB_TOKEN"]).hub_token == "HUB_TOKEN"
    assert config_from_words(WithToken, ["label_key=digit"]).label_key == "digit"
    with pytest.raises(ConfigError, match="hub_token holds a secret") as caught:
        config_from_words(WithToken, ["hub_token=hf_abc123"])
    assert "set hub_token=HUB_TOKEN" in caught.value.fix
    assert "abc123" not in str(caught.value)


def test_no_secret_goes_into_a_batch_script() -> None:
    for words in (("--hub-token", "hf_abc"), ("api_key=abc",), ("--password=x",)):
        with pytest.raises(ConfigError, match="secret") as caught:
            BatchJob(("path", "train.py", *words), Path("x"), Path(), "python", 1, 1, 0, "10")
        assert "abc" not in str(caught.value)
