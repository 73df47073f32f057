"""Checks that more than one setting needs."""

from __future__ import annotations

from paceline.errors import ConfigError


def has_login(address: str) -> bool:
    """Return whether an address contains a user name or a password.

    >>> has_login("s3://bucket/me@work"), has_login("http://host:80/x")
    (False, False)
    >>> has_login("s3://key:12/x@bucket"), has_login("sftp://me@host/x")
    (True, True)
    """
    for part in address.split("://")[1:]:
        host, _, path = part.partition("/")
        if "@" in host:
            return True
        port = host.rpartition(":")[2]
        if ":" in host and ("@" in path or not port.isdecimal()):
            return True
    return False


def at_least(least: int, name: str, value: int) -> None:
    """Raise ConfigError for a number below the limit."""
    if value < least:
        raise ConfigError(
            f"{name} must be at least {least}, got {value}", fix=f"set {name}={least} or more"
        )
