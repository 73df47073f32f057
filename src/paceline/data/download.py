"""Download small public datasets from mirrors.

Files are accepted by checksum only: `paceline data get`.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from paceline import handover
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError, DataError, EnvironmentUnfit, did_you_mean
from paceline.rundir import make_private, write_whole
from paceline.version import VERSION

_OPEN_S = 5.0  # until a mirror answers, including DNS
_READ_S = 15.0  # without data, once it has answered
_CHUNK_BYTES = 1 << 17
_BAR_WIDTH = 24


class File(NamedTuple):
    """One file of a public dataset."""

    name: str
    size_bytes: int
    sha256: str
    plain_sha256: str = ""
    """The checksum of the unpacked file, if known: any archive of the same content is accepted."""


class PublicDataset(NamedTuple):
    """The files of a dataset, and the mirrors that have them."""

    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    """Addresses; {name} is replaced by the name of a file."""


_MNIST = (
    File("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    File("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    File("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    File("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)  # fmt: skip
_FASHION = (
    File("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    File("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    File("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    File("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)  # fmt: skip
_SHAKESPEARE = (
    File("tinyshakespeare.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
)  # fmt: skip

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


@dataclass(frozen=True, kw_only=True)
class GetArguments:
    """Files are downloaded from public mirrors and checked by their SHA-256; intact files are kept."""

    name: str = positional(metavar="NAME")
    """Dataset to download: mnist, fashion-mnist or tinyshakespeare."""
    to: str = option("", metavar="FOLDER")
    """Folder for the files (default: a folder of that name in $PACELINE_DATA, or in ./data)."""
    json: bool = False
    """Print the paths as JSON."""


def main(arguments: GetArguments) -> int:
    """Download a dataset and print the paths of its files."""
    root = Path(os.environ.get(handover.DATA) or "data")
    folder = Path(arguments.to) if arguments.to else root / arguments.name
    paths = fetch(arguments.name, folder, progress=None if arguments.json else sys.stderr)
    files = [str(path) for path in paths]
    if arguments.json:
        print(json.dumps({"set": arguments.name, "folder": str(folder), "files": files}, indent=1))
    else:
        print("\n".join(files))
    return 0


def fetch(
    name: str, folder: Path, mirrors: Sequence[str] | None = None, progress: TextIO | None = None
) -> list[Path]:
    """Return the files of a dataset; missing or damaged ones are downloaded."""
    if name not in PUBLIC_DATASETS:
        raise ConfigError(
            f"there is no public dataset {name!r}", fix=did_you_mean(name, PUBLIC_DATASETS)
        )
    dataset = PUBLIC_DATASETS[name]
    source = _Mirrors(dataset.mirrors if mirrors is None else mirrors, progress)
    with _using(folder):
        paths = {file: _present(folder, file) for file in dataset.files}
    missing = [file for file, path in paths.items() if path is None]
    for number, file in enumerate(missing):
        path = folder / file.name
        if path.exists():
            source.say(f"{path} has another checksum and is downloaded again\n")
        content = source.content_of(file)
        if content is None:
            raise _not_downloaded(name, folder, missing[number:], source)
        with _using(folder):
            write_whole(make_private(folder) / file.name, content)
        paths[file] = path
    return [path for path in paths.values() if path is not None]


@contextlib.contextmanager
def _using(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot use {folder}: {error.strerror or error}",
            fix="free some space or fix the permissions, or name another folder with --to FOLDER",
        ) from error


class _Mirrors:
    """Mirrors that are tried in order; an unreachable host is not tried again."""

    def __init__(self, addresses: Sequence[str], progress: TextIO | None) -> None:
        self.addresses, self.problems = addresses, dict[str, str]()
        self._progress, self._dead = progress, set[str]()

    def content_of(self, file: File) -> bytes | None:
        """Download a file from the first mirror that has it; None if no mirror has it."""
        for template in self.addresses:
            address = template.replace("{name}", file.name)
            host = urlsplit(address).netloc
            if host in self._dead:
                continue
            try:
                content = b"".join(self._chunks(address, file))
            except urllib.error.HTTPError as error:
                self.problems[address] = f"{error.code} {error.reason}"
                error.close()
            except (OSError, HTTPException, ValueError) as error:
                why = str(getattr(error, "reason", error))
                self.problems[address] = why or type(error).__name__
                self._dead.add(host)
            else:
                if is_good(content, file):
                    self.say(f"downloaded {file.name} ({len(content):,} bytes) from {host}\n")
                    return content
                self.problems[address] = f"{len(content):,} bytes with another checksum"
            self.say("")  # erase the bar of the failed download
        return None

    def _chunks(self, address: str, file: File) -> Iterator[bytes]:
        received = 0
        with _opened(address) as answer:
            while received <= 2 * file.size_bytes and (chunk := answer.read(_CHUNK_BYTES)):
                received += len(chunk)
                if self._progress is not None and self._progress.isatty():
                    self.say(bar_line(file.name, received, file.size_bytes))
                yield chunk

    def say(self, text: str) -> None:
        """Print a line; on a terminal it replaces the progress bar."""
        if self._progress is not None:
            start = "\r\x1b[K" if self._progress.isatty() else ""
            self._progress.write(start + text)
            self._progress.flush()


def bar_line(name: str, received: int, size_bytes: int) -> str:
    """Return the progress bar of a download.

    >>> bar_line("x.gz", 500_000, 2_000_000)
    '━━━━━━·················· x.gz  0.5 of 2.0 MB'
    """
    filled = min(_BAR_WIDTH, _BAR_WIDTH * received // size_bytes)
    bar = "━" * filled + "·" * (_BAR_WIDTH - filled)
    return f"{bar} {name}  {received / 1e6:.1f} of {size_bytes / 1e6:.1f} MB"


def _opened(address: str) -> Any:
    """Open an address, or raise after a few seconds: DNS has no timeout of its own."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def request() -> None:
        try:
            answers.put(_opener().open(address, timeout=_READ_S))
        except Exception as error:  # noqa: BLE001 - raised again below
            answers.put(error)

    threading.Thread(target=request, daemon=True).start()
    try:
        answer = answers.get(timeout=_OPEN_S)
    except queue.Empty:
        raise TimeoutError(f"no answer in {_OPEN_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https only, also after redirects."""
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
    """Return the path of a file, packed or not, if its checksum matches."""
    for path in (folder / file.name, folder / file.name.removesuffix(".gz")):
        if path.is_file() and is_good(path.read_bytes(), file):
            return path
    return None


def is_good(content: bytes, file: File) -> bool:
    """Return whether the checksum of a file matches, packed or unpacked."""
    if hashlib.sha256(content).hexdigest() == file.sha256:
        return True
    try:
        packed = content[:2] == b"\x1f\x8b"
        with gzip.GzipFile(fileobj=io.BytesIO(content)) if packed else io.BytesIO(content) as plain:
            return hashlib.file_digest(plain, "sha256").hexdigest() == file.plain_sha256
    except (OSError, EOFError, zlib.error):
        return False


def _not_downloaded(
    name: str, folder: Path, missing: Sequence[File], source: _Mirrors
) -> DataError:
    reasons = "".join(f"\n  {address}: {why}" for address, why in source.problems.items())
    wanted = ""
    for file in missing:
        wanted += f"\n    {folder / file.name}  {file.size_bytes:,} bytes, SHA-256 {file.sha256}"
        for address in source.addresses[:1]:
            wanted += f"\n      from {address.replace('{name}', file.name)}"
    return DataError(
        f"no mirror of {name} could be used:{reasons}",
        fix=f"download these files on a machine with a network, put them here, and run this again:{wanted}",
    )
