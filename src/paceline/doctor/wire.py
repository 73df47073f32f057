"""How ranks and whoever examines them talk: JSON, a line each, of bounded length, over one connection; no pickle."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any, Self

ANSWER_S = 120.0
"""How long the other side may take for an answer, when everybody is there."""
_LONGEST = 1 << 20
_ROUNDS = 5


class Connection:
    """One connection; every line is awaited for a limited time."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._reader = connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._connection.close()

    def say(self, **words: Any) -> None:
        """Send a line."""
        self._connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Return the next line; an OSError says that there is none, or that it is not of this kind."""
        line = self._reader.readline(_LONGEST)
        try:
            said = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise ConnectionError(
                "the other side has left" if not line else "the other side says something else"
            )
        return said

    def ask_proof(self, secret: str) -> dict[str, Any]:
        """Let the other side prove that it knows the secret, which itself is never sent; return what it says with it."""
        nonce = secrets.token_hex(16)
        self.say(nonce=nonce)
        said = self.hear()
        if not hmac.compare_digest(str(said.get("proof", "")), _proof(secret, nonce)):
            raise ConnectionError("somebody else came")
        return said

    def prove(self, secret: str, **words: Any) -> None:
        """Prove that this side knows the secret, and say what is to be said."""
        self.say(proof=_proof(secret, str(self.hear().get("nonce", ""))), **words)

    def compare_clocks(self) -> tuple[float, float]:
        """Return how far the other side's clock is ahead, and by how much that may be wrong."""
        best = (0.0, float("inf"))
        for _ in range(_ROUNDS):
            sent = time.time()
            self.say(clock=True)
            theirs = float(self.hear()["clock"])
            heard = time.time()
            best = min(
                best,
                (theirs - (sent + heard) / 2, max(0.0, heard - sent) / 2),
                key=lambda pair: pair[1],
            )
        return best


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()
