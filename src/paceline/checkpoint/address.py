"""Which storage an address means."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.storage import Storage


def open_storage(home: Path, to: str, name: str) -> Storage:
    """Return the storage of a run: its own folder, or a folder of its name at an address."""
    if "://" in to:
        from paceline.checkpoint.remote_storage import RemoteStorage

        return RemoteStorage(f"{to.rstrip('/')}/{name}")
    return LocalStorage(Path(to) / name if to else home)
