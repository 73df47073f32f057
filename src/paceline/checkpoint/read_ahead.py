"""Reads the newest checkpoint in a thread, while the script still imports packages and builds its model."""

from __future__ import annotations

import threading

from paceline.checkpoint.manifest import FileFacts, Manifest
from paceline.checkpoint.storage import Storage, read_manifest, read_verified

_MAX_BYTES = 4 << 30
"""Bytes that may wait in memory; larger files are read when they are needed."""


class ReadAhead:
    """A rank's share of the files of the newest checkpoint, each verified by its checksum."""

    def __init__(self, storage: Storage, rank: int, ranks: int) -> None:
        self._storage, self._rank, self._ranks = storage, rank, ranks
        self._kept: dict[tuple[int, str], tuple[FileFacts, bytearray]] = {}
        self._thread = threading.Thread(target=self._read, name="paceline-read-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for step in self._storage.steps()[:1]:
                self._keep(read_manifest(self._storage, step))
        except Exception:  # noqa: BLE001 - the run finds the same problem, and reports it
            return

    def _keep(self, manifest: Manifest) -> None:
        left = _MAX_BYTES
        for name in share_of(manifest, self._rank, self._ranks):
            facts = manifest.files[name]
            left -= facts.size_bytes
            if left < 0:
                return
            content = read_verified(self._storage, manifest.step, name, facts)
            self._kept[manifest.step, name] = facts, content

    def get(self, step: int, name: str, facts: FileFacts) -> bytearray | None:
        """Return the bytes of a file with this size and checksum; None if it was not read."""
        self._thread.join()
        kept_facts, content = self._kept.get((step, name), (None, None))
        return content if kept_facts == facts else None

    def clear(self) -> None:
        """Free the memory."""
        self._thread.join()
        self._kept.clear()


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """Return the names of the files that a rank verifies."""
    return sorted(manifest.files)[rank::ranks]
