"""Check that all lanes of all ranks gather and reduce the same FSDP units in the same order.

Every rank takes part in every exchange of a unit. A lane that skips a layer would make ranks wait for each other, or
add the gradients of one layer to those of another of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup

from paceline.errors import ConfigError
from paceline.world.collectives import all_gather_flat

_MOST_BYTES = 256


class _Exchange(NamedTuple):
    action: str
    unit: str
    elements: int

    def __str__(self) -> str:
        return f"{self.action} {self.unit}"


class UnitOrder:
    """Compares each exchange with that of the first lane; in the first update also with those of other ranks.

    All ranks of a shard group run the same number of lanes, so they agree in every lane. Another shard group may run
    fewer: all groups agree in the last lane, which is when they add their sums.
    """

    def __init__(self, shard_group: ProcessGroup, lanes: int) -> None:
        self._shard_group, self._lanes = shard_group, lanes
        self._expected: list[_Exchange] = []
        self._lane = self._next = 0
        self._is_first_lane = self._is_first_update = True
        self._in_lane = False

    def begin_update(self) -> None:
        """Expect the exchanges of the first lane."""
        self._lane = self._next = 0
        self._in_lane = True

    def check(self, action: str, unit: str, elements: int = 0) -> None:
        """Raise before an exchange in which the ranks would not agree; outside of updates do nothing."""
        if not self._in_lane:
            return
        found = _Exchange(action, unit, elements)
        if self._is_first_update:
            self._agree(found)
        if self._is_first_lane:
            self._expected.append(found)
        elif found != self._expected[self._next]:
            raise _other_layers(str(found), str(self._expected[self._next]))
        self._next += 1

    def end_lane(self, without_gradient: Iterable[str] = ()) -> None:
        """Raise if the lane had other exchanges, or other parameters without a gradient, than the first one."""
        self.check("had no gradients for", ", ".join(without_gradient) or "no parameter")
        self._is_first_lane = False
        self._lane, self._next = self._lane + 1, 0

    def end_update(self, without_gradient: Iterable[str] = ()) -> None:
        """End the last lane."""
        self.end_lane(without_gradient)
        self._is_first_update = self._in_lane = False

    def _agree(self, found: _Exchange) -> None:
        """Raise on all ranks of a group if one of them is about to do something else."""
        is_last = self._lane == self._lanes - 1
        text = f"{found} ({found.elements} elements)".encode()[:_MOST_BYTES].ljust(_MOST_BYTES)
        row = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = all_gather_flat(row, None if is_last else self._shard_group).view(-1, _MOST_BYTES)
        for other in rows:
            if not torch.equal(other, rows[0]):
                one, another = (
                    bytes(each.tolist()).decode(errors="replace") for each in (rows[0], other)
                )
                raise _other_layers(one.rstrip(), another.rstrip())


def _other_layers(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"parallel=fsdp needs the same layers in every lane, but one lane {one} where another {other}",
        fix="call every layer in every lane, and multiply what is to be skipped by 0; if a layer is checkpointed several times, pass "
        "use_reentrant=False to torch.utils.checkpoint.checkpoint; or set parallel=ddp",
    )
