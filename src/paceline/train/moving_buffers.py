"""How buffers that forward changes, such as BatchNorm statistics, are updated.

Every lane starts an update with the same buffers, and a buffer changes by the mean of its changes in all lanes. So
the result depends on the lanes, not on the ranks that ran them. Every lane is examined: a buffer may change in some
lanes only, or from a later step on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch import Tensor, nn

from paceline.errors import TrainingError
from paceline.scale.batch import share
from paceline.train.bucket_exchange import TreeShape
from paceline.train.note import NO_MOVES, Moves
from paceline.world.collectives import all_gather_rows, sum_across
from paceline.world.world import World

_ALWAYS_COMPARED = 1 << 12
"""Elements of a buffer that is compared by value in every lane. Larger ones are compared if they were written to."""

PREFIX = "buffer."
"""Begins the names of buffers in a checkpoint that are not in a state_dict."""


class _Buffer:
    """One buffer of a model: its value at the start of the update, and whether a lane has changed it."""

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self._module, self._key, self.name = module, key, name
        self.is_persistent = key not in module._non_persistent_buffers_set  # noqa: SLF001 - no public way
        # BatchNorm writes its statistics without a trace in the version counter.
        self._is_statistic = hasattr(module, "running_mean")

    def begin(self) -> None:
        """Remember the value at the start of an update."""
        self.original = self.now()
        self.start = self.original.clone()
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes

    def now(self) -> Tensor:
        """Return the current value."""
        value = self._module._buffers[self._key]  # noqa: SLF001 - torch has no public table of a module's own buffers
        assert value is not None
        return value

    def change(self) -> Tensor | None:
        """Return the change since the start as float64; None if there is none. Resets the buffer."""
        now = self.now()
        written = now is not self.original or now._version != self._version  # noqa: SLF001 - torch's count of writes
        if not written and not self._is_statistic and now.numel() > _ALWAYS_COMPARED:
            return None
        if now.shape != self.start.shape:
            raise TrainingError(
                f"forward changed the shape of the buffer {self.name} from {list(self.start.shape)} to {list(now.shape)}",
                fix="give it its final shape in __init__, or keep it outside of the model and track it with run.track",
            )
        self._module._buffers[self._key] = self.original  # noqa: SLF001 - forward may have assigned another tensor
        if torch.equal(now, self.start):
            return None
        value = now.detach().double()
        changed = torch.where(self._finite(), value - self.start.double(), value)
        self._set(self.start)
        return changed.cpu().flatten()

    def _finite(self) -> Tensor:
        """Return where a difference has a meaning: not for statistics that start at infinity."""
        return self.start.double().isfinite()

    def apply(self, change: Tensor) -> None:
        """Change the buffer from its value at the start."""
        mean = change.view(self.start.shape).to(self.start.device)
        self._set(torch.where(self._finite(), self.start.double() + mean, mean))

    def _set(self, value: Tensor) -> None:
        with torch.no_grad():
            self.original.copy_(value)
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes


class MovingBuffers:
    """The buffers of some models, and their changes in each lane of an update."""

    def __init__(self, models: Sequence[nn.Module], lanes: int, world: World) -> None:
        self._world, self._lanes = world, lanes
        self._mine = share(lanes, world.rank, world.size)
        # A single lane changes the buffers itself.
        self._buffers = list(_buffers_of(models)) if lanes > 1 else []
        self._known: list[int] = []
        """Numbers of the buffers for which every note has room: the same on all ranks."""
        self._new: list[dict[int, Tensor]] = []
        """For each lane of this update, the changes of other buffers."""

    def begin(self) -> None:
        """Remember all buffers at the start of an update."""
        self._new = []
        for buffer in self._buffers:
            buffer.begin()

    def after_lane(self, *, counts: bool) -> Moves:
        """Return the changes of the known buffers in one lane (zeros if it does not count); reset all buffers."""
        changes: dict[int, Tensor] = {}
        for number, buffer in enumerate(self._buffers):
            change = buffer.change()
            if change is not None and counts:
                changes[number] = change
        pieces = []
        for number in self._known:
            zeros = torch.zeros(self._buffers[number].start.numel(), dtype=torch.float64)
            pieces.append(changes.pop(number, zeros))
        self._new.append(changes)
        return torch.cat(pieces).numpy() if pieces else NO_MOVES

    def reset(self) -> None:
        """Undo the changes of a forward that does not count."""
        for buffer in self._buffers:
            buffer.change()

    def not_persistent(self) -> dict[str, Tensor]:
        """Return the buffers that have changed and that are not in a state_dict."""
        found = {}
        for number in self._known:
            buffer = self._buffers[number]
            if not buffer.is_persistent:
                found[f"{PREFIX}{buffer.name}"] = buffer.now()
        return found

    def restore_one(self, name: str, value: Tensor) -> bool:
        """Restore a buffer that `not_persistent` returned; return whether there is one of this name."""
        for number, buffer in enumerate(self._buffers):
            if name == f"{PREFIX}{buffer.name}":
                buffer.now().copy_(value)
                self._known = sorted({*self._known, number})
                return True
        return False

    @property
    def found_new(self) -> bool:
        """Whether a lane of this rank changed a buffer for which the notes have no room yet."""
        return any(self._new)

    def apply(self, moves: Moves, lanes: int, *, any_new: bool) -> None:
        """Change the buffers by the mean over the lanes that had samples. Every rank must call this."""
        sizes = [self._buffers[number].start.numel() for number in self._known]
        known = (
            torch.split(torch.from_numpy(numpy.ascontiguousarray(moves)), sizes) if sizes else ()
        )
        totals = dict(zip(self._known, known, strict=True))
        if any_new:
            totals |= self._agree_on_new()
        for number, total in totals.items():
            if total.any():
                self._buffers[number].apply(total / lanes)

    def _agree_on_new(self) -> dict[int, Tensor]:
        """Return the changes of new buffers, added over all lanes along the tree. Every rank calls this."""
        seen = torch.zeros(len(self._buffers), dtype=torch.float64)
        for changes in self._new:
            seen[list(changes)] = 1.0
        found = sum_across(self._world, seen).nonzero().flatten().tolist()
        sizes = [self._buffers[number].start.numel() for number in found]
        rows = torch.zeros(
            len(share(self._lanes, 0, self._world.size)), sum(sizes), dtype=torch.float64
        )
        for row, changes in zip(rows, self._new, strict=False):
            for number, place in zip(found, torch.split(row, sizes), strict=True):
                if number in changes:
                    place.copy_(changes[number])
        total = self._add_up(all_gather_rows(self._world, rows))
        self._known = sorted({*self._known, *found})
        return dict(zip(found, torch.split(total, sizes), strict=True))

    def _add_up(self, rows_of_ranks: Tensor) -> Tensor:
        """Add the rows of all lanes along the tree."""
        lanes = []
        for rank, rows in enumerate(rows_of_ranks):
            lanes += list(rows[: len(share(self._lanes, rank, self._world.size))])
        each = [range(lane, lane + 1) for lane in range(self._lanes)]
        total = torch.empty_like(lanes[0])
        TreeShape.over(each, self._lanes, 0).add_up(lanes, total)
        return total


def _buffers_of(models: Sequence[nn.Module]) -> Iterator[_Buffer]:
    """Yield every buffer once, with its name."""
    seen = set()
    for number, model in enumerate(models):
        for prefix, module in model.named_modules(prefix=str(number) if number else ""):
            for key, value in module._buffers.items():  # noqa: SLF001 - its own, not its children's
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield _Buffer(module, key, f"{prefix}.{key}" if prefix else key)
