"""What becomes of buffers that forward changes, such as BatchNorm statistics.

The rule: every lane starts the step with the same buffers, and a buffer moves by the mean of what the step's
lanes did to it. So it depends on the lanes, never on who ran them. Which buffers move is found by one trial
forward before the first step; all others are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.data.reading.source import Batch
from paceline.train.note import NO_MOVES, Moves
from paceline.world.collectives import sum_across
from paceline.world.world import World


class MovingBuffers:
    """The buffers that forward changes, and how lanes change them together."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._start: list[Tensor] = []
        self._start_flat = _flat(buffers)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._buffers)

    def begin(self) -> None:
        """Remember where the step starts."""
        if self._buffers:
            self._start = [buffer.clone() for buffer in self._buffers]
            self._start_flat = _flat(self._start)

    def move_of_lane(self, *, counts: bool) -> Moves:
        """Return how far one lane moved the buffers."""
        if not self._buffers:
            return NO_MOVES
        now = _flat(self._buffers)
        move = (
            torch.where(now == self._start_flat, 0.0, now - self._start_flat) * counts
        )  # inf - inf is no move
        found: Moves = move.cpu().numpy()
        return found

    def restore(self) -> None:
        """Put the buffers back for the next lane, once backward no longer needs them."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._start)

    def apply(self, moves: Moves, lanes: int) -> None:
        """Move the buffers by the mean over the lanes that had samples."""
        if not self._buffers:
            return
        target = self._start_flat + torch.from_numpy(moves).to(self._start_flat.device) / lanes
        pieces = torch.split(target, [buffer.numel() for buffer in self._buffers])
        torch._foreach_copy_(
            self._buffers,
            [piece.view_as(buffer) for piece, buffer in zip(pieces, self._buffers, strict=True)],
        )


def find_moving_buffers(model: nn.Module, batch: Batch, lanes: int, world: World) -> MovingBuffers:
    """Run one trial forward and see which buffers move on any rank. Every rank must call this."""
    buffers = list(model.buffers())
    if lanes == 1 or not buffers:
        return MovingBuffers([])
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        model(*batch[:-1])
    moved = torch.tensor(
        [not torch.equal(old, new) for old, new in zip(before, buffers, strict=True)],
        dtype=torch.float64,
    )
    torch._foreach_copy_(buffers, before)
    anywhere = sum_across(world, moved)
    return MovingBuffers([buffer for buffer, move in zip(buffers, anywhere, strict=True) if move])


def _flat(buffers: list[Tensor]) -> Tensor:
    return (
        torch.cat([buffer.flatten().double() for buffer in buffers])
        if buffers
        else torch.zeros(0, dtype=torch.float64)
    )
