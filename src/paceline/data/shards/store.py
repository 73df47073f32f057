"""Where the files of a set come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.data.safe_open import read_bounded
from paceline.data.shards.index import INDEX, LONGEST_INDEX, DatasetIndex, ShardFacts
from paceline.errors import DataError


class ShardStore(Protocol):
    """The folder of a set, here or at an address."""

    address: str
    capacity_bytes: int
    """How many bytes of shards may be here at the same time; 0: all of them."""

    def index(self) -> DatasetIndex:
        """Read what the set says of itself."""

    def fetch(self, shard: ShardFacts) -> Path:
        """Return where a shard lies on this machine, after it was brought here if need be."""

    def read_file(self, name: str) -> bytes:
        """Read a small file that the index names besides the shards. It has not been summed."""


@runtime_checkable
class FetchingStore(Protocol):
    """A store that brings shards from elsewhere, and may have to let others go for them."""

    def prefetch(self, shards: Sequence[ShardFacts]) -> None:
        """Begin to bring the first few of these, in the background."""

    def drop(self, shard: ShardFacts) -> None:
        """Let go of a shard that is not right any more: it is brought again when it is asked for."""


class LocalShardStore:
    """A folder that this machine sees."""

    capacity_bytes = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)

    def index(self) -> DatasetIndex:
        """Read index.json."""
        path = self._folder / INDEX
        try:
            content = read_bounded(path, LONGEST_INDEX)
        except OSError as error:
            why = (
                "there is no set"
                if isinstance(error, FileNotFoundError)
                else f"{error.strerror or error}: no set"
            )
            raise DataError(
                f"{why} in {self._folder}: {path.name} cannot be read",
                fix="make one with `paceline data pack`, or name another folder",
            ) from error
        return DatasetIndex.from_json(content, str(path))

    def fetch(self, shard: ShardFacts) -> Path:
        """Return the path of a shard."""
        return self._folder / shard.name

    def read_file(self, name: str) -> bytes:
        """Read a file that lies beside the shards."""
        return read_dataset_file(self._folder, name)


def read_dataset_file(folder: Path, name: str) -> bytes:
    """Read a file of a set that is no shard."""
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {folder / name}: {error.strerror}",
            fix="fetch or pack the set again: its index names that file",
        ) from error
