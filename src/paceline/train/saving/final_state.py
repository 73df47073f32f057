"""What a script makes of the model after the loop (merged adapters, other weights): saved apart, and never resumed from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from torch import Tensor

from paceline import terminal
from paceline.exact.sharded_tensor import is_sharded, local_part
from paceline.train.saving.checkpointing import Checkpoints, shorten
from paceline.train.saving.run_state import RunState, checksum
from paceline.world.collectives import all_gather_texts
from paceline.world.world import World

_NAMED = 2


class FinalState:
    """Compares the model at the end of the run with the model as the loop left it, which the last checkpoint holds."""

    def __init__(self, world: World, state: RunState, checkpoints: Checkpoints) -> None:
        self._world, self._state, self._checkpoints = world, state, checkpoints
        self._left: dict[str, str] = {}

    def remember(self) -> None:
        """Remember the model as the loop leaves it."""
        self._left = _checksums(self._state.weights())

    def keep(self, step: int) -> None:
        """Save the weights if the script has changed them since. Every rank must call this."""
        weights = self._state.weights()
        now = _checksums(weights)
        names = {*now, *self._left}
        changed = sorted(name for name in names if now.get(name) != self._left.get(name))
        replicated = {name: now[name] for name, value in weights.items() if not is_sharded(value)}
        digest = hashlib.sha256(json.dumps([sorted(weights), replicated]).encode()).hexdigest()
        ranks = [
            json.loads(text)
            for text in all_gather_texts(self._world, json.dumps([changed, digest]))
        ]
        self._checkpoints.delete_final()  # the next gather keeps other ranks from writing before
        changed = sorted({name for names, _ in ranks for name in names})
        if not changed or not weights:
            return
        if len({digest for _, digest in ranks}) > 1:
            self._warn_of_difference(
                changed, [rank for rank, (names, _) in enumerate(ranks) if names]
            )
            return
        # Adapters alone, if no other weight has changed.
        if all(map(self._state.is_saved, changed)):
            weights = {name: value for name, value in weights.items() if self._state.is_saved(name)}
        self._checkpoints.save_final(step, weights, _shown(changed))

    def _warn_of_difference(self, changed: list[str], ranks: list[int]) -> None:
        if self._world.is_main:
            which = f"rank {', '.join(map(str, ranks))}"
            terminal.error(
                f"warning: {which} changed the model after the loop ({_shown(changed)}), and the ranks now differ: "
                "the change is not saved, and `paceline ckpt export` gives the weights of the last step\n"
                "  fix: change the model on every rank alike, or save the result in the script"
            )


def _shown(names: list[str]) -> str:
    return shorten([name.removeprefix("model.") for name in names], _NAMED)


def _checksums(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a short text per tensor that changes with its type, shape and bits; of a shard, with this rank's part."""
    return {
        name: f"{value.dtype} {tuple(value.shape)} {int(checksum(local_part(value)))}"
        for name, value in weights.items()
    }
