"""Check that all lanes of all ranks gather and reduce the same FSDP units in the same order.

Every rank takes part in every exchange of a unit. A lane that skips a layer would make ranks wait for each other, or
add the gradients of one layer to those of another of the same size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from paceline.errors import ConfigError
from paceline.world.collectives import all_gather_rows, all_gather_texts
from paceline.world.world import World


class _Exchange(NamedTuple):
    action: str
    unit: str
    elements: int

    def __str__(self) -> str:
        return f"{self.action} {self.unit}"


class UnitOrder:
    """Compares each exchange with that of the first lane, and the first lane with that of the other ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._expected: list[_Exchange] = []
        self._next = 0
        self._is_first = True
        self._in_lane = False

    def begin_lane(self) -> None:
        """Expect the exchanges of a lane from the first on."""
        self._next, self._in_lane = 0, True

    def check(self, action: str, unit: str, elements: int = 0) -> None:
        """Raise before an exchange in which the ranks would not agree; outside of lanes do nothing."""
        if not self._in_lane:
            return
        found = _Exchange(action, unit, elements)
        if self._is_first:
            self._agree(found)
            self._expected.append(found)
        elif found != self._expected[self._next]:
            raise _other_layers(str(found), str(self._expected[self._next]))
        self._next += 1

    def end_lane(self, without_gradient: Iterable[str]) -> None:
        """Raise if the lane had other exchanges, or other parameters without a gradient, than the first one."""
        self.check("had no gradients for", ", ".join(without_gradient) or "no parameter")
        self._is_first = self._in_lane = False

    def _agree(self, found: _Exchange) -> None:
        """Raise on all ranks if one of them is about to do something else. Every rank calls this in its first lane."""
        text = f"{found} ({found.elements} elements)"
        rows = all_gather_rows(self._world, torch.tensor([zlib.crc32(text.encode())]))
        if (rows == rows[0]).all():
            return
        texts = all_gather_texts(self._world, text)
        raise _other_layers(texts[0], next(each for each in texts if each != texts[0]))


def _other_layers(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"parallel=fsdp needs the same layers in every lane, but one lane {one} where another {other}",
        fix="set parallel=ddp; or call every layer in every lane, and multiply what is to be skipped by 0",
    )
