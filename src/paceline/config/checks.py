"""Checks that more than one setting needs."""

from __future__ import annotations

import re

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


_SECRET = re.compile(
    r"(?:^|_)(?:[a-z0-9]*(?:secret|password|passwd|passphrase|credentials?)"
    r"|(?:auth|access|api|hub|hf|bearer|bot|github|wandb)_?token|(?:api|access|secret|private|account|auth|wandb)_?key)(?:_|$)|^token$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def takes_secret(name: str) -> bool:
    """Return whether a setting of this name can only be meant for a secret; `redact.is_secret` suspects more names.

    >>> [takes_secret(name) for name in ("hub_token", "api-key", "db.password", "label_key", "pad_token", "tokens")]
    [True, True, True, False, False, False]
    """
    return bool(_SECRET.search(name.rpartition(".")[2].replace("-", "_")))


def refuse_secret(name: str, value: object) -> None:
    """Raise ConfigError for a setting that holds a secret: settings are written to files, logs and object stores.

    Such a setting takes the name of an environment variable: `hub_token=HUB_TOKEN`.
    """
    if not isinstance(value, str) or not value:
        return
    if takes_secret(name) and not _VARIABLE.fullmatch(value):
        variable = re.sub(r"[^A-Z0-9]", "_", name.upper())
        raise ConfigError(
            f"{name} holds a secret, and settings are written to files",
            fix=f"export it as an environment variable, set {name}={variable}, the name of that variable, "
            f"and read os.environ[config.{name}] in the script",
        )
    if has_login(value):
        raise ConfigError(
            f"{name} contains a user name or password in its address, and settings are written to files",
            fix="remove it from the address, and set the environment variables of the service, "
            "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )


def at_least(least: int, name: str, value: int) -> None:
    """Raise ConfigError for a number below the limit."""
    if value < least:
        raise ConfigError(
            f"{name} must be at least {least}, got {value}", fix=f"set {name}={least} or more"
        )
