"""Public sets are fetched from whichever mirror has them, and nothing is kept whose checksum is not right."""

from __future__ import annotations  # noqa: I001

import gzip
import hashlib
import io
import json
import socket
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.data import download as get
from paceline.data.download import PUBLIC_DATASETS, File, PublicDataset
from paceline.errors import ConfigError, DataError, EnvironmentUnfit
from typing import Self

CONTENT = {"one.gz": gzip.compress(b"one" * 5000, mtime=0), "two.txt": bytes(range(256)) * 600}


class Mirror:
    """A real server on this machine, with files that are good or bad."""

    def __init__(self, files: dict[str, bytes], *, cut: int = 0) -> None:
        self.asked: list[str] = []
        mirror = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                name = self.path.rpartition("/")[2]
                if self.path.startswith("/moved/"):
                    self.send_response(302)
                    self.send_header(
                        "Location", f"/files/{name}" if name in files else "file:///etc/passwd"
                    )
                    self.end_headers()
                elif name not in files:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(files[name])))
                    self.end_headers()
                    self.wfile.write(files[name][: len(files[name]) - cut])

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.address = f"http://{self.host}/files/{{name}}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(autouse=True)
def small_set(monkeypatch) -> None:
    """A set of two small files, the first of which is known by its content as well."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
    plain = {"one.gz": hashlib.sha256(b"one" * 5000).hexdigest()}
    files = tuple(
        File(name, len(CONTENT[name]), sums[name], plain.get(name, "")) for name in CONTENT
    )
    monkeypatch.setitem(PUBLIC_DATASETS, "small", PublicDataset(files, ()))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def good() -> Iterator[Mirror]:
    with Mirror(CONTENT) as mirror:
        yield mirror


@pytest.fixture
def dead() -> Iterator[str]:
    """The address of a port on which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}/{{name}}"


def check_whole(folder: Path, paths: list[Path]) -> None:
    assert paths == [folder / name for name in CONTENT]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def test_files_are_fetched_whole_and_for_their_owner_alone(good, tmp_path) -> None:
    folder = tmp_path / "new" / "folder"
    check_whole(folder, get.fetch("small", folder, [good.address]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


BAD = {
    "other bytes": ({name: content[::-1] for name, content in CONTENT.items()}, 0, "checksum"),
    "a page that says no": (dict.fromkeys(CONTENT, b"<html>log in first</html>"), 0, "25 bytes"),
    "a torn file": (CONTENT, 100, "checksum"),
    "an endless file": (dict.fromkeys(CONTENT, bytes(5_000_000)), 0, "checksum"),
    "no file": ({}, 0, "404"),
}


@pytest.mark.parametrize(("files", "cut", "why"), BAD.values(), ids=BAD)
def test_a_bad_mirror_is_passed_over_and_leaves_nothing(files, cut, why, good, tmp_path) -> None:
    with Mirror(files, cut=cut) as bad:
        with pytest.raises(DataError, match=why) as caught:
            get.fetch("small", tmp_path / "nowhere", [bad.address])
        assert bad.host in caught.value.problem
        assert not (tmp_path / "nowhere").exists()
        paths = get.fetch("small", tmp_path / "got", [bad.address, good.address])
        check_whole(tmp_path / "got", paths)


def test_a_dead_mirror_is_asked_once(dead, good, tmp_path, monkeypatch) -> None:
    asked = []
    opened = get._opened
    monkeypatch.setattr(get, "_opened", lambda address: asked.append(address) or opened(address))
    check_whole(tmp_path / "got", get.fetch("small", tmp_path / "got", [dead, good.address]))
    assert asked == [
        dead.format(name="one.gz"),
        *(good.address.format(name=name) for name in CONTENT),
    ]


def test_a_mirror_that_moved_is_followed_but_only_to_the_web(good, tmp_path) -> None:
    moved = f"http://{good.host}/moved/{{name}}"
    check_whole(tmp_path / "got", get.fetch("small", tmp_path / "got", [moved]))
    with pytest.raises(DataError, match="file"):
        get.fetch("small", tmp_path / "other", [f"http://{good.host}/moved/passwd"])


def test_a_mirror_that_never_answers_is_given_up(good, tmp_path, monkeypatch) -> None:
    opened, before = get._opened, set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/{{name}}"

        def impatient(asked: str) -> object:
            with monkeypatch.context() as limits:
                if not asked.startswith(good.address.partition("{")[0]):
                    limits.setattr(get, "_OPEN_S", 0.2)
                    limits.setattr(get, "_READ_S", 1.0)
                return opened(asked)

        monkeypatch.setattr(get, "_opened", impatient)
        check_whole(tmp_path / "got", get.fetch("small", tmp_path / "got", [address, good.address]))
        for thread in set(threading.enumerate()) - before:
            thread.join(30)


def test_without_a_network_it_is_told_which_files_go_where(dead, tmp_path) -> None:
    (tmp_path / "two.txt").write_bytes(CONTENT["two.txt"])
    with pytest.raises(DataError, match="one.gz"):
        get.fetch("small", tmp_path, [])
    with pytest.raises(DataError) as caught:
        get.fetch("small", tmp_path, [dead])
    assert caught.value.exit_code == 3
    assert "Connection refused" in caught.value.problem
    assert f"{tmp_path / 'one.gz'}  {len(CONTENT['one.gz'])} bytes" in caught.value.fix
    assert hashlib.sha256(CONTENT["one.gz"]).hexdigest() in caught.value.fix
    assert "two.txt" not in caught.value.fix


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "tinyshakespeare"])
def test_every_set_has_mirrors_on_more_than_one_host_and_a_sum_for_every_file(name) -> None:
    assert len({address.split("/")[2] for address in PUBLIC_DATASETS[name].mirrors}) >= 2
    assert {len(file.sha256) for file in PUBLIC_DATASETS[name].files} == {64}


def test_a_good_file_is_kept_and_a_bad_one_is_fetched_again(good, tmp_path) -> None:
    (tmp_path / "one.gz").write_bytes(CONTENT["one.gz"])
    (tmp_path / "two.txt").write_bytes(b"torn")
    shown = io.StringIO()
    check_whole(tmp_path, get.fetch("small", tmp_path, [good.address], progress=shown))
    assert good.asked == ["/files/two.txt"]
    assert str(tmp_path / "two.txt") in shown.getvalue()
    for content in (b"", b"\x1f\x8b", CONTENT["one.gz"][:-9], b"\x1f\x8b" + bytes(90)):
        assert not get.is_good(content, PUBLIC_DATASETS["small"].files[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [("one.gz", gzip.compress(b"one" * 5000, 1, mtime=7)), ("one", b"one" * 5000)],
)
def test_the_same_content_packed_another_way_or_not_at_all_is_as_good(
    name, content, good, tmp_path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert get.fetch("small", tmp_path, [good.address])[0] == tmp_path / name
    assert good.asked == ["/files/two.txt"]


def test_an_unknown_set_and_a_folder_that_cannot_be_are_told(good, tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean mnist"):
        get.fetch("mnst", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnfit, match="name another folder with --to FOLDER"):
        get.fetch("small", tmp_path / "file", [good.address])


@pytest.mark.parametrize(("to", "home"), [("there", "there"), ("", "data/small")])
def test_the_verb_says_where_the_files_are(to, home, good, tmp_path, monkeypatch, capsys) -> None:
    here = PUBLIC_DATASETS["small"]._replace(mirrors=(good.address,))
    monkeypatch.setitem(PUBLIC_DATASETS, "small", here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    paths = [f"{home}/{name}" for name in CONTENT]
    assert get.main(get.GetArguments(name="small", to=to)) == 0
    assert capsys.readouterr().out.split() == paths
    assert get.main(get.GetArguments(name="small", to=to, json=True)) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"set": "small", "folder": home, "files": paths}
    assert said.err == ""


def test_the_real_mnist_is_known_by_its_content(mnist_folder) -> None:
    paths = get.fetch("mnist", mnist_folder, [])
    assert [path.name for path in paths] == [file.name for file in PUBLIC_DATASETS["mnist"].files]
