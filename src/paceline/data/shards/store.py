"""Where the files of a dataset come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.data.shards.index import INDEX, LONGEST_INDEX, DatasetIndex, ShardFacts
from paceline.errors import DataError
from paceline.safe_open import read_bytes, refuse_outside

_LARGEST_FILE = 1 << 28  # of those besides the shards: a tokenizer has some MB


class ShardStore(Protocol):
    """The folder of a dataset, on this machine or at an address."""

    address: str
    capacity_bytes: int
    """Bytes of shards that fit on this machine at a time; 0: no limit."""

    def index(self) -> DatasetIndex:
        """Read the index of the dataset."""

    def fetch(self, shard: ShardFacts) -> Path:
        """Return the path of a shard on this machine; download it first if needed."""

    def read_file(self, name: str) -> bytes:
        """Read a small file that the index lists besides the shards.

        Its checksum is not verified.
        """


@runtime_checkable
class FetchingStore(Protocol):
    """A store that downloads shards, and may evict others to make space."""

    def prefetch(self, shards: Sequence[ShardFacts]) -> None:
        """Start to download the first few of these in the background."""

    def drop(self, shard: ShardFacts) -> None:
        """Delete a damaged shard; the next request downloads it again."""


class LocalShardStore:
    """A folder on a file system of this machine."""

    capacity_bytes = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)

    def index(self) -> DatasetIndex:
        """Read index.json."""
        path = self._folder / INDEX
        try:
            content = read_bytes(path, LONGEST_INDEX, links=True)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = "it does not exist" if missing else error.strerror or error
            raise DataError(
                f"{self._folder} is not a dataset: cannot read {path.name}: {why}",
                fix="make a dataset with `paceline data pack`, or check the path",
            ) from error
        return DatasetIndex.from_json(content, str(path))

    def fetch(self, shard: ShardFacts) -> Path:
        """Return the path of a shard."""
        return self._folder / shard.name

    def read_file(self, name: str) -> bytes:
        """Read a file in the folder of the dataset."""
        return read_dataset_file(self._folder, name)


def read_dataset_file(folder: Path, name: str) -> bytes:
    """Read a file of a dataset other than a shard, such as its tokenizer. It must not be a link out of the folder."""
    try:
        refuse_outside(folder / name, folder)
        return read_bytes(folder / name, _LARGEST_FILE, links=True)
    except OSError as error:
        raise DataError(
            f"cannot read {folder / name}, which the index lists: {error.strerror}",
            fix="download or pack the dataset again",
        ) from error
