"""Messages in the rendezvous store of several nodes, signed: torch's store lets every process that reaches it write."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.errors import EnvironmentUnfit
from paceline.safe_open import read_text

_MAC_DIGITS = 64
_SHORTEST = 16  # characters of a secret


class Board(Protocol):
    """The operations of torch's store that messages need."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""

    def add(self, key: str, amount: int) -> int:
        """Increase a counter; return its value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether values exist."""


def signing_key(secret: str, nonce: bytes) -> bytes:
    """Return the key of one start of a job: HMAC of rank 0's nonce with the secret of the job; empty without a secret."""
    return hmac.digest(secret.encode(), nonce, hashlib.sha256) if secret else b""


def read_secret(path: Path) -> str:
    """Return the secret in a file that only its owner can read."""
    try:
        facts, secret = path.stat(), read_text(path, links=True).strip()
    except (OSError, ValueError) as error:
        raise EnvironmentUnfit(
            f"cannot read the job secret in {path}: {error}",
            fix="write it on every node: `(umask 077; openssl rand -hex 32 > FILE)`, once, then copy it",
        ) from error
    if stat.S_IMODE(facts.st_mode) & 0o077 or facts.st_uid != os.getuid():
        raise EnvironmentUnfit(
            f"other users can read the job secret in {path} (mode {facts.st_mode & 0o777:o}, owner {facts.st_uid})",
            fix=f"run `chmod 600 {path}`, and put a new secret into it",
        )
    if len(secret) < _SHORTEST:
        raise EnvironmentUnfit(
            f"the job secret in {path} has {len(secret)} characters; it needs at least {_SHORTEST}",
            fix=f"write a new one: `openssl rand -hex 32 > {path}`",
        )
    return secret


class SignedBoard:
    """A store whose values carry an HMAC of key and value; a value of anybody else is an error. Counters are not signed."""

    def __init__(self, board: Board, key: bytes) -> None:
        self._board, self._key = board, key

    def set(self, key: str, value: str) -> None:
        """Store a value with its signature."""
        self._board.set(key, self._mac(key, value) + value)

    def get(self, key: str) -> bytes:
        """Wait for a value; raise if its signature is wrong."""
        return self._verified(key, self._board.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values; raise if a signature is wrong."""
        return list(map(self._verified, keys, self._board.multi_get(keys)))

    def add(self, key: str, amount: int) -> int:
        """Increase a counter; return its value."""
        return self._board.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether values exist."""
        return self._board.check(list(keys))

    def _mac(self, key: str, value: str) -> str:
        text = f"{len(key)}:{key}{value}".encode()
        return hmac.digest(self._key, text, hashlib.sha256).hex()

    def _verified(self, key: str, content: bytes) -> bytes:
        mac, value = content[:_MAC_DIGITS], content[_MAC_DIGITS:]
        expected = self._mac(key, value.decode(errors="replace")).encode()
        if not hmac.compare_digest(mac, expected):
            raise EnvironmentUnfit(
                f"the message {key} in the rendezvous store carries a wrong signature: a process that is not a rank of "
                "this job has written it, or the ranks have different job secrets",
                fix="give all nodes the same secret file; else ask who else uses this network, and see docs/security.md",
            )
        return value


def signed(board: Board, key: bytes) -> Board:
    """Return a store of signed messages; without a key, the store itself."""
    return SignedBoard(board, key) if key else board
