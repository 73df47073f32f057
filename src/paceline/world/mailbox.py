"""Messages between ranks without waiting, for threads that must not use the collectives of the training."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from paceline.world.signed_store import signed
from paceline.world.world import World


class Mailbox:
    """Messages by key that every rank can post and read; it uses the store of the rendezvous, and signs between nodes."""

    def __init__(self, world: World, name: str) -> None:
        shared: Store = HashStore()
        if world.size > 1:
            shared = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self._store = signed(PrefixStore(f"mailbox-{name}", shared), world.signing_key)

    def post(self, key: str, message: str) -> None:
        """Send a message to all ranks."""
        self._store.set(key, message)

    def look(self, key: str) -> str | None:
        """Return a message, or None if it is not there yet."""
        return self._store.get(key).decode() if self._store.check([key]) else None
