"""The moving buffers of a captured update: the arithmetic of `MovingBuffers`, on the GPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from paceline.train.step.captured_outcome import CannotCapture
from paceline.train.step.moving_buffers import (
    Buffer,
    MovingBuffers,
    buffers_of,
    changed_by,
    write,
)

_EXACT = 1 << 53  # changes are float64, which holds smaller whole numbers exactly


class _Group:
    """Buffers of one dtype, and where their changes lie in a note."""

    def __init__(self, buffers: list[Buffer], first: int) -> None:
        self._buffers = buffers
        self._sizes = [buffer.original.numel() for buffer in buffers]
        self._start = torch.cat([buffer.original.flatten() for buffer in buffers])
        self.place = slice(first, first + sum(self._sizes))

    def begin(self) -> None:
        """Remember the values at the start of the update."""
        torch.cat([buffer.original.flatten() for buffer in self._buffers], out=self._start)

    def changes(self) -> Tensor:
        """Return the changes since the start as flat float64."""
        now = torch.cat([buffer.now().detach().flatten() for buffer in self._buffers]).double()
        start = self._start.double()
        return torch.where(start.isfinite(), now - start, now)

    def reset(self) -> None:
        """Undo the changes of a lane."""
        write(self._buffers, self._parts(self._start))

    def change_by(self, mean: Tensor) -> None:
        """Give every buffer its value at the start plus a change."""
        write(self._buffers, self._parts(changed_by(self._start.double(), mean)))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        pairs = zip(torch.split(flat, self._sizes), self._buffers, strict=True)
        return [part.view(buffer.original.shape) for part, buffer in pairs]


class CapturedBuffers:
    """What a captured update does with buffers. All tensors stay where they are from one replay to the next."""

    def __init__(
        self, moving: MovingBuffers, models: Sequence[nn.Module], lanes: int, first: int
    ) -> None:
        self._moving = moving
        # A single lane changes the buffers itself.
        self._own = list(buffers_of(models)) if lanes == 1 else moving.known
        self._memory = [buffer.original for buffer in self._own]
        self._is_one_lane = lanes == 1
        self._groups: list[_Group] = []
        for _, same in groupby(moving.known, lambda buffer: buffer.original.dtype):
            buffers = list(same)
            _refuse_unfit(buffers)
            self._groups.append(_Group(buffers, first))
            first = self._groups[-1].place.stop
        self.any = bool(self._groups)
        """Whether lanes share buffers that change."""
        self.end = first
        """The length of a note with all changes."""

    def begin(self) -> None:
        """Remember all buffers at the start of the update."""
        for group in self._groups:
            group.begin()

    def take(self, row: Tensor, *, counts: bool) -> None:
        """Write the changes of a lane's forward into its note; zeros if it does not count."""
        for group in self._groups:
            place = row[group.place]
            if counts:
                place.copy_(group.changes())
            else:
                place.zero_()

    def reset(self) -> None:
        """Undo the changes of a lane; a single lane keeps them, in the memory that the next replay reads."""
        for group in self._groups:
            group.reset()
        if self._is_one_lane:
            self.collect()

    def collect(self) -> None:
        """Copy buffers that were assigned into the memory that a replay reads."""
        for buffer, memory in zip(self._own, self._memory, strict=True):
            now = buffer.now()
            if now is not memory:
                buffer.original = memory
                write([buffer], [now.detach()])

    def apply(self, total: Tensor, lanes: Tensor) -> None:
        """Change the buffers by the mean of the changes in a sum of notes."""
        for group in self._groups:
            group.change_by(total[group.place] / lanes)

    def refuse_unknown(self) -> None:
        """Raise if forward wrote to a buffer whose value has not changed so far: notes have no room for it."""
        for buffer in self._moving.unknown:
            if buffer.is_written:
                raise CannotCapture(
                    f"forward writes to the buffer {buffer.name}, whose value did not change before"
                )

    def forget(self) -> None:
        """Note that a replay has written the buffers."""
        for buffer in self._own:
            buffer.forget()


def _refuse_unfit(buffers: list[Buffer]) -> None:
    for buffer in buffers:
        values = buffer.original.double()
        if not values.isfinite().all():
            raise CannotCapture(f"the buffer {buffer.name} is not finite")
        if not buffer.original.is_floating_point() and (values.abs() > _EXACT).any():
            raise CannotCapture(f"the buffer {buffer.name} has whole numbers above 2^53")
