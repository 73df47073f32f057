"""An object store for tests: a real S3 API on this machine."""

from __future__ import annotations  # noqa: I001

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping

import boto3
import pytest
import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from typing import Self

SECRET = "a-word/that+nobody=may-see"

Request = tuple[str, str, str]
"""Method, path, query."""


class ObjectStore:
    """A server with S3's API that remembers the order of requests, and can hold some of them."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.requests: list[Request] = []
        self.held: Callable[[Request], object] = lambda request: False
        self._deciding = (
            threading.Lock()
        )  # S3 looks and writes in one go; this server would look, then write
        self.came, self.release = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ, start):
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        self.requests.append(request)
        if self.held(request):
            self.came.set()
            self.release.wait(60)
            start(self._status, [])
            return [b""]
        with self._deciding if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return self._app(environ, start)

    @contextlib.contextmanager
    def refusing(
        self, what: Callable[[Request], object], status: str = "403 Forbidden"
    ) -> Iterator[None]:
        """Refuse some requests, at once."""
        self.held, self._status = what, status
        self.release.set()
        try:
            yield
        finally:
            self.held = lambda request: False

    @contextlib.contextmanager
    def holding(self, what: Callable[[Request], bool]) -> Iterator[None]:
        """Hold some requests; they are refused when this ends."""
        with self.refusing(what):
            self.came.clear()
            self.release.clear()
            try:
                yield
            finally:
                self.release.set()

    def put(self) -> list[str]:
        """Return what was put, in order."""
        return [path for method, path, _ in self.requests if method == "PUT"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with ObjectStore() as store:
        yield store


def variables(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "AKIA0000TEST",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@pytest.fixture
def env(server, monkeypatch) -> Iterator[Mapping[str, str]]:
    """The variables of the store, which a new connection reads."""
    found = variables(server.url)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield found
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def client(server, env):
    """A plain client, which looks at the store from the side."""
    found = boto3.client("s3")
    yield found
    found.close()


@pytest.fixture
def bucket(server, client) -> str:
    """A bucket of the test's own; requests are counted from here on."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    server.requests.clear()
    return name


def change(client, bucket: str, key: str, how: Callable[[bytes], bytes]) -> None:
    content = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    client.put_object(Bucket=bucket, Key=key, Body=how(content))


def flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 4]) + content[-4:]
