"""How ranks leave each other word without waiting: for threads that must not touch the collectives of the training."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from paceline.world.world import World


class Mailbox:
    """Letters by key, which every rank can post and look for; made of the store in which the ranks met."""

    def __init__(self, world: World, name: str) -> None:
        met: Store = dist.distributed_c10d._get_default_store() if world.size > 1 else HashStore()  # noqa: SLF001 - no public way
        self._store = PrefixStore(f"mailbox-{name}", met)

    def post(self, key: str, letter: str) -> None:
        """Leave a letter."""
        self._store.set(key, letter)

    def look(self, key: str) -> str | None:
        """Return a letter if it has come; do not wait for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None
