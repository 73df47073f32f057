"""Where the shards of a stream are, for a checkpoint: a resumed run need not read what was read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.data.reading.batches import Batches
from paceline.data.reading.stream import Stream
from paceline.train.saving.tracked import decode, encode
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World


def save_stream(world: World, batches: Batches) -> dict[str, Any]:
    """Return the state of every shard, by lane; empty without a stream that uses it. Every rank must call this."""
    if not isinstance(batches.source, Stream) or not batches.source.use_state:
        return {}
    own: dict[str, Any] = {}
    for lane, state in batches.source.state().items():
        tensors: dict[str, Tensor] = {}
        encoded = encode(state, tensors, f"the stream of lane {lane}")
        if not tensors:  # with tensors in it, a resumed run skips instead
            own[lane] = encoded
    states: dict[str, Any] = {}
    for text in all_gather_texts(world, json.dumps(own)):
        states |= json.loads(text)
    return states


def restore_stream(batches: Batches, states: Mapping[str, Any]) -> None:
    """Let a stream continue from what `save_stream` returned."""
    if isinstance(batches.source, Stream) and batches.source.use_state:
        batches.source.restore({lane: decode(state, {}) for lane, state in states.items()})
