"""How buffers that forward changes, such as BatchNorm statistics, are updated.

Every lane starts the step with the same buffers, and a buffer changes by the mean of its changes in all lanes. So
the result depends on the lanes, not on the ranks that ran them. One trial forward before the first step finds the
buffers that change; all others are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.data.reading.source import Batch
from paceline.train.note import NO_MOVES, Moves
from paceline.world.collectives import sum_across
from paceline.world.world import World


class MovingBuffers:
    """The buffers that forward changes, and the changes of each lane."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._start: list[Tensor] = []
        self._start_flat = _flat(buffers)

    @property
    def any(self) -> bool:
        """Whether forward changes any buffer."""
        return bool(self._buffers)

    def begin(self) -> None:
        """Remember the buffers at the start of the step."""
        if self._buffers:
            self._start = [buffer.clone() for buffer in self._buffers]
            self._start_flat = _flat(self._start)

    def move_of_lane(self, *, counts: bool) -> Moves:
        """Return the change of all buffers in one lane; zeros if the lane does not count."""
        if not self._buffers:
            return NO_MOVES
        now = _flat(self._buffers)
        unchanged = now == self._start_flat  # also for inf, where the difference is nan
        change = torch.where(unchanged, 0.0, now - self._start_flat) * counts
        moves: Moves = change.cpu().numpy()
        return moves

    def restore(self) -> None:
        """Reset the buffers for the next lane, once backward no longer needs them."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._start)

    def apply(self, moves: Moves, lanes: int) -> None:
        """Change the buffers by the mean over the lanes that had samples."""
        if not self._buffers:
            return
        target = self._start_flat + torch.from_numpy(moves).to(self._start_flat.device) / lanes
        pieces = torch.split(target, [buffer.numel() for buffer in self._buffers])
        pairs = zip(pieces, self._buffers, strict=True)
        torch._foreach_copy_(self._buffers, [piece.view_as(buffer) for piece, buffer in pairs])


def find_moving_buffers(model: nn.Module, batch: Batch, lanes: int, world: World) -> MovingBuffers:
    """Run one trial forward to find the buffers that change on any rank. Every rank must call this."""
    buffers = list(model.buffers())
    if lanes == 1 or not buffers:
        return MovingBuffers([])
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        model(*batch[:-1])
    changed = [not torch.equal(old, new) for old, new in zip(before, buffers, strict=True)]
    torch._foreach_copy_(buffers, before)
    ranks = sum_across(world, torch.tensor(changed, dtype=torch.float64))
    return MovingBuffers([buffer for buffer, count in zip(buffers, ranks, strict=True) if count])


def _flat(buffers: list[Tensor]) -> Tensor:
    if not buffers:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([buffer.flatten().double() for buffer in buffers])
