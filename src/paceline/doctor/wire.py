"""Messages between the ranks and the collector: lines of JSON with a maximum length; no pickle."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any, Self

ANSWER_S = 120.0
"""Timeout of an answer once all ranks are connected."""
_MAX_LINE = 1 << 20
_CLOCK_ROUNDS = 5


class Connection:
    """A socket with a timeout per line."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._reader = connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._reader.close()
        self._connection.close()

    def send(self, **message: Any) -> None:
        """Send a message as one line of JSON."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message; raise ConnectionError if the peer closed or sent no JSON object."""
        line = self._reader.readline(_MAX_LINE)
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError(
                "connection closed" if not line else "not a message of the doctor"
            )
        return message

    def require_proof(self, secret: str) -> dict[str, Any]:
        """Let the peer prove that it knows the secret, which is never sent; return its message."""
        nonce = secrets.token_hex(16)
        self.send(nonce=nonce)
        message = self.receive()
        if not hmac.compare_digest(str(message.get("proof", "")), _proof(secret, nonce)):
            raise ConnectionError("the peer does not know the secret")
        return message

    def prove(self, secret: str, **message: Any) -> None:
        """Send a message with the proof that this side knows the secret."""
        nonce = str(self.receive().get("nonce", ""))
        self.send(proof=_proof(secret, nonce), **message)

    def compare_clocks(self) -> tuple[float, float]:
        """Return how far the peer's clock is ahead in seconds, and the error of that value."""
        best = (0.0, float("inf"))
        for _ in range(_CLOCK_ROUNDS):
            sent_s = time.time()
            self.send(clock=True)
            peer_s = float(self.receive()["clock"])
            received_s = time.time()
            error_s = max(0.0, received_s - sent_s) / 2
            if error_s < best[1]:
                best = (peer_s - (sent_s + received_s) / 2, error_s)
        return best


def _proof(secret: str, nonce: str) -> str:
    return hmac.new(secret.encode(), nonce.encode(), hashlib.sha256).hexdigest()
