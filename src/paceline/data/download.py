"""Small public sets for a start: fetched from mirrors, and trusted by their checksums alone."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import queue
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from paceline import handover
from paceline.errors import ConfigError, DataError, EnvironmentUnfit, did_you_mean
from paceline.rundir import make_private, write_whole
from paceline.version import VERSION

_OPEN_S = 5.0  # until a mirror answers; names that nobody resolves are waited for as well
_READ_S = 15.0  # of silence, once it has
_CHUNK_BYTES = 1 << 17
_BAR_WIDTH = 24


class File(NamedTuple):
    """One file of a public set."""

    name: str
    size_bytes: int
    sha256: str
    plain_sha256: str = ""
    """Of the unpacked file, where it is known: archives of the same content are as good."""


class PublicDataset(NamedTuple):
    """Some files, and where they are."""

    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    """Addresses, in which {name} stands for the name of a file."""


_MNIST = (
    File("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    File("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    File("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    File("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)  # fmt: skip
_FASHION = (
    File(
        "train-images-idx3-ubyte.gz",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    File(
        "train-labels-idx1-ubyte.gz",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    File(
        "t10k-images-idx3-ubyte.gz",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    File(
        "t10k-labels-idx1-ubyte.gz",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)
_SHAKESPEARE = (
    File(
        "tinyshakespeare.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
)

PUBLIC_DATASETS = {
    "mnist": PublicDataset(
        _MNIST,
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
            "https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
        ),
    ),
    "fashion-mnist": PublicDataset(
        _FASHION,
        (
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{name}",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/{name}",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}",
        ),
    ),
    "tinyshakespeare": PublicDataset(
        _SHAKESPEARE,
        (
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
        ),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `paceline data get`."""
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(PUBLIC_DATASETS)}")
    parser.add_argument(
        "--to",
        default="",
        metavar="FOLDER",
        help="default: one of its name in PACELINE_DATA, or in ./data",
    )
    parser.add_argument("--json", action="store_true", help="print where the files are as JSON")


def main(known: argparse.Namespace) -> int:
    """Fetch a set, and say where it is."""
    folder = (
        Path(known.to) if known.to else Path(os.environ.get(handover.DATA) or "data") / known.name
    )
    paths = fetch(known.name, folder, shown=None if known.json else sys.stderr)
    if known.json:
        print(
            json.dumps(
                {"set": known.name, "folder": str(folder), "files": [str(path) for path in paths]},
                indent=1,
            )
        )
    else:
        print("\n".join(str(path) for path in paths))
    return 0


def fetch(
    name: str, folder: Path, mirrors: Sequence[str] | None = None, shown: TextIO | None = None
) -> list[Path]:
    """Return the files of a set; those that are not in the folder, or not what they should be, are fetched."""
    if name not in PUBLIC_DATASETS:
        raise ConfigError(
            f"there is no set {name!r} to get", fix=did_you_mean(name, PUBLIC_DATASETS)
        )
    chosen = PUBLIC_DATASETS[name]
    asked = _Mirrors(chosen.mirrors if mirrors is None else mirrors, shown)
    with _using(folder):
        found = {file: _present(folder, file) for file in chosen.files}
    for file in [file for file, path in found.items() if path is None]:
        if (folder / file.name).exists():
            asked.say(f"{folder / file.name} is not what it should be, and is fetched again\n")
        content = asked.content_of(file)
        if content is None:
            raise _not_to_be_had(
                name, folder, [file for file, path in found.items() if path is None], asked
            )
        with _using(folder):
            write_whole(make_private(folder) / file.name, content)
        found[file] = folder / file.name
    return [path for path in found.values() if path is not None]


@contextlib.contextmanager
def _using(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot use {folder}: {error.strerror or error}",
            fix="free some space or permit writing there, or name another folder with --to FOLDER",
        ) from error


class _Mirrors:
    """Hosts that are asked one after the other; one that could not be reached is not asked again."""

    def __init__(self, addresses: Sequence[str], shown: TextIO | None) -> None:
        self.addresses, self.problems = addresses, dict[str, str]()
        self._shown, self._dead = shown, set[str]()

    def content_of(self, file: File) -> bytes | None:
        """Return a whole file, from the first mirror that has it."""
        for address in (text.replace("{name}", file.name) for text in self.addresses):
            host = urlsplit(address).netloc
            if host in self._dead:
                continue
            try:
                content = b"".join(self._chunks(address, file))
            except urllib.error.HTTPError as error:
                self.problems[address] = f"{error.code} {error.reason}"
                error.close()
            except (OSError, HTTPException, ValueError) as error:
                self.problems[address] = (
                    str(getattr(error, "reason", error)) or type(error).__name__
                )
                self._dead.add(host)
            else:
                if is_good(content, file):
                    self.say(f"fetched {file.name} ({len(content):,} bytes) from {host}\n")
                    return content
                self.problems[address] = f"{len(content):,} bytes with another checksum"
            self.say("")  # no bar is left of what came to nothing
        return None

    def _chunks(self, address: str, file: File) -> Iterator[bytes]:
        seen = 0
        with _opened(address) as answer:
            while seen <= 2 * file.size_bytes and (chunk := answer.read(_CHUNK_BYTES)):
                seen += len(chunk)
                if self._shown is not None and self._shown.isatty():
                    self.say(bar_line(file.name, seen, file.size_bytes))
                yield chunk

    def say(self, text: str) -> None:
        """Show a line, or write over the last one."""
        if self._shown is not None:
            start = "\r\x1b[K" if self._shown.isatty() else ""
            self._shown.write(start + text)
            self._shown.flush()


def bar_line(name: str, seen: int, size_bytes: int) -> str:
    """Return how far a download is.

    >>> bar_line("x.gz", 500_000, 2_000_000)
    '━━━━━━·················· x.gz  0.5 of 2.0 MB'
    """
    filled = min(_BAR_WIDTH, _BAR_WIDTH * seen // size_bytes)
    return f"{'━' * filled}{'·' * (_BAR_WIDTH - filled)} {name}  {seen / 1e6:.1f} of {size_bytes / 1e6:.1f} MB"


def _opened(address: str) -> Any:
    """Return a mirror's answer, or raise after a few seconds: a name server that is silent has no limit of its own."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_opener().open(address, timeout=_READ_S))
        except Exception as error:  # noqa: BLE001 - raised again below
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_OPEN_S)
    except queue.Empty:
        raise TimeoutError(f"no answer in {_OPEN_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https, and no other kind of address, wherever one leads to."""
    opener = urllib.request.OpenerDirector()
    opener.addheaders = [("User-Agent", f"paceline/{VERSION}")]
    for handler in (
        urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(), urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(), urllib.request.UnknownHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _present(folder: Path, file: File) -> Path | None:
    """Return the file in a folder, packed or not, if it is what it should be."""
    for path in (folder / file.name, folder / file.name.removesuffix(".gz")):
        if path.is_file() and is_good(path.read_bytes(), file):
            return path
    return None


def is_good(content: bytes, file: File) -> bool:
    """Return whether these are the bytes of a file, or of another archive of the same content."""
    if hashlib.sha256(content).hexdigest() == file.sha256:
        return True
    try:
        packed = content[:2] == b"\x1f\x8b"
        with gzip.GzipFile(fileobj=io.BytesIO(content)) if packed else io.BytesIO(content) as plain:
            return hashlib.file_digest(plain, "sha256").hexdigest() == file.plain_sha256
    except (OSError, EOFError, zlib.error):
        return False


def _not_to_be_had(name: str, folder: Path, missing: Sequence[File], asked: _Mirrors) -> DataError:
    reasons = "".join(f"\n  {address}: {why}" for address, why in asked.problems.items())
    wanted = "".join(
        f"\n    {folder / file.name}  {file.size_bytes:,} bytes, SHA-256 {file.sha256}"
        + "".join(
            f"\n      from {address.replace('{name}', file.name)}"
            for address in asked.addresses[:1]
        )
        for file in missing
    )
    return DataError(
        f"{name} could not be fetched from any mirror:{reasons}",
        fix=f"on a machine with a network fetch these files, put them here, and run this again:{wanted}",
    )
