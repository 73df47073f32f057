"""What a setting may not be, whichever it is."""

from __future__ import annotations

from paceline.errors import ConfigError


def has_login(address: str) -> bool:
    """Return whether an address carries a name or a password.

    >>> [has_login(text) for text in ("s3://bucket/me@work", "s3://key:12/x@bucket", "sftp://me@host/x", "http://host:80/x")]
    [False, True, True, False]
    """
    parts = [part.partition("/") for part in address.split("://")[1:]]
    return any(
        "@" in host or (":" in host and ("@" in rest or not host.rpartition(":")[2].isdecimal()))
        for host, _, rest in parts
    )


def at_least(least: int, name: str, value: int) -> None:
    """Refuse a number that is too small."""
    if value < least:
        raise ConfigError(f"{name}={value} is too small", fix=f"set {name} to {least} or more")
