"""Open an object store by its address (s3:// or any other fsspec protocol), and translate its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paceline.errors import ConfigError, EnvironmentUnfit


class Unreachable(EnvironmentUnfit):
    """A request to an object store failed; the next one may succeed."""

    comes_again = False


def open_address(address: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it."""
    import fsspec  # type: ignore[import-untyped]

    scheme = address.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{scheme}:// needs a package that is not installed ({error})",
            fix=f"pip install 'fsspec[{scheme}]'",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{address}: {error}",
            fix="use a path, s3://bucket/folder, or another address that fsspec supports",
        ) from error
    return fs, str(root).rstrip("/")


@contextlib.contextmanager
def reaching(verb: str, address: str) -> Iterator[None]:
    """Turn any exception of the storage library into an error that names the address and the fix."""
    try:
        yield
    except (FileNotFoundError, EnvironmentUnfit):
        raise
    except Exception as error:
        raise Unreachable(
            f"cannot {verb} {address}: {type(error).__name__}: {error}",
            fix="check the address, the network, and the credentials (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)",
        ) from error
