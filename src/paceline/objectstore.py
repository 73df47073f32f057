"""How an address (s3:// and whatever else fsspec knows) is opened, and what its errors mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paceline.errors import ConfigError, EnvironmentUnfit


class Unreachable(EnvironmentUnfit):
    """A store did not do what was asked; the next time it may."""

    comes_again = False


def open_address(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path of the address in it."""
    import fsspec  # type: ignore[import-untyped]

    scheme = address.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise EnvironmentUnfit(
            f"{scheme}:// needs a package that is not here ({error})",
            fix=f"pip install 'fsspec[{scheme}]'",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{address}: {error}",
            fix="use a path, s3://bucket/folder, or another address that fsspec knows",
        ) from error
    return fs, str(root).rstrip("/")


@contextlib.contextmanager
def reaching(verb: str, address: str) -> Iterator[None]:
    """Turn whatever the store's own library raises into an error that names the address and the way out."""
    try:
        yield
    except (FileNotFoundError, EnvironmentUnfit):
        raise
    except Exception as error:
        raise Unreachable(
            f"cannot {verb} {address}: {type(error).__name__}: {error}",
            fix="check the address, the network, and the storage's own variables (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)",
        ) from error
