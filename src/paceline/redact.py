"""Remove secrets from settings, environment variables and messages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.config.checks import has_login

REMOVED = "[removed]"

_WORDS = r"[a-z0-9]*(?:secret|token|passwords?|passwd|passphrase|credentials?)|pass|auth|authorization|bearer|sig|signature"
_KEYS = r"[a-z0-9]*keys?"
_BEFORE, _AFTER = r"(?<![a-z0-9])", r"(?![a-z0-9])"
_SECRET = re.compile(rf"{_BEFORE}(?:{_WORDS}|{_KEYS}){_AFTER}", re.IGNORECASE)
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_VALUE = r"""(?:(?:bearer|basic)\s+)?(?:"[^"]*"|'[^']*'|[^\s&]+)"""
_NAME = rf"[\w.-]*{_BEFORE}(?:{_WORDS}|{_KEYS}){_AFTER}[\w.-]*"
_GIVEN = re.compile(rf"({_NAME}=|--{_NAME}\s+|{_BEFORE}(?:{_WORDS}):\s+){_VALUE}", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a setting or variable of this name may hold a secret.

    >>> [is_secret(name) for name in ("AWS_SECRET_ACCESS_KEY", "hub.token", "DB_PASS", "lr.base", "tokens", "tokenizer")]
    [True, True, True, False, False, False]
    """
    return bool(_SECRET.search(name))


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without secrets, including those within their values.

    >>> without_secrets({"api_key": "abc", "seed": 3, "data": "sftp://me:pw@host/set", "more": {"password": 1}})
    {'api_key': '[removed]', 'seed': 3, 'data': '[removed]', 'more': {'password': '[removed]'}}
    """
    return {
        name: REMOVED if is_secret(str(name)) else _plain(value) for name, value in settings.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return without_logins(value) if isinstance(value, str) else value


def without_secret_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command without secrets.

    >>> without_secret_words(["train.py", "--hub-token", "abc", "api_key=abc", "lr=1"])
    ['train.py', '--hub-token', '[removed]', 'api_key=[removed]', 'lr=1']
    """
    found: list[str] = []
    before = ""
    for word in words:
        follows = before.startswith("--") and "=" not in before and is_secret(before)
        found.append(REMOVED if follows else without_logins(word))
        before = word
    return found


def command_line(words: Iterable[str]) -> str:
    """Return a command as one line for a shell, without secrets.

    >>> command_line(["python", "my train.py", "hub_token=abc"])
    "python 'my train.py' hub_token=[removed]"
    """
    plain = without_secret_words(words)
    return " ".join(word if REMOVED in word else shlex.quote(word) for word in plain)


def without_logins(text: str) -> str:
    """Return text without addresses that contain a login, and without named secrets.

    >>> without_logins("cannot reach s3://key:12/x@bucket now; hub_token=abc lr=1")
    'cannot reach [removed] now; hub_token=[removed] lr=1'
    >>> without_logins("--token abc password='a b' Authorization: Bearer abc ?sig=abcd&x=1 KeyError: 'boot' tokens=3")
    "--token [removed] password=[removed] Authorization: [removed] ?sig=[removed]&x=1 KeyError: 'boot' tokens=3"
    """
    text = _ADDRESS.sub(lambda match: REMOVED if has_login(match[0]) else match[0], text)
    return _GIVEN.sub(rf"\1{REMOVED}", text)
