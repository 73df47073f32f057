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
from paceline.train.gradients.bucket_exchange import TreeShape
from paceline.train.gradients.note import NO_MOVES, Moves
from paceline.world.collectives import all_gather_rows, sum_across
from paceline.world.world import World

_ALWAYS_COMPARED = 1 << 12
"""Elements of a buffer that is compared by value in every lane. Larger ones are compared if they were written to."""

PREFIX = "buffer."
"""Begins the names of buffers in a checkpoint that are not in a state_dict."""


class Buffer:
    """One buffer of a model, and its value at the start of the update."""

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self._module, self._key, self.name = module, key, name
        self.is_persistent = key not in module._non_persistent_buffers_set  # noqa: SLF001 - no public way
        self.first = None if self.is_persistent else self.now().clone()
        """The value before the first update, of a buffer that is not in the state_dict."""
        # BatchNorm writes its statistics without a trace in the version counter.
        is_statistic = hasattr(module, "running_mean")
        self._always_compared = is_statistic or self.now().numel() <= _ALWAYS_COMPARED
        self.remember()

    def remember(self) -> None:
        """Let the current value be that at the start of the next update."""
        self.original = self.now()
        self.start = self.original.clone()
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes

    def begin(self) -> None:
        """Remember the value at the start of an update."""
        if self.may_have_changed:
            self.remember()

    def now(self) -> Tensor:
        """Return the current value."""
        value = self._module._buffers[self._key]  # noqa: SLF001 - torch has no public table of a module's own buffers
        assert value is not None
        return value

    @property
    def may_have_changed(self) -> bool:
        """Whether the values must be compared to know."""
        return self._always_compared or self.is_written

    @property
    def is_written(self) -> bool:
        """Whether it was assigned or written since the start, as far as torch knows."""
        now = self.now()
        return now is not self.original or now._version != self._version  # noqa: SLF001 - torch's count of writes

    def differs(self) -> Tensor:
        """Return whether the value differs from that at the start, on the device."""
        now = self.now()
        if now.shape != self.start.shape:
            raise TrainingError(
                f"forward changed the shape of the buffer {self.name} from {list(self.start.shape)} to {list(now.shape)}",
                fix="give it its final shape in __init__, or keep it outside of the model and track it with run.track",
            )
        return (now != self.start).any()

    def change(self) -> Tensor:
        """Return the change since the start as flat float64."""
        value = self.now().detach().double()
        return torch.where(self._finite(), value - self.start.double(), value).flatten()

    def _finite(self) -> Tensor:
        """Return where a difference has a meaning: not for statistics that start at infinity."""
        return self.start.double().isfinite()

    def changed_by(self, change: Tensor) -> Tensor:
        """Return the value at the start plus a flat change."""
        return changed_by(self.start.double(), change.view(self.start.shape))

    def forget(self) -> None:
        """Note that a replay has written the buffer, which torch does not count."""
        self._version = -1

    def written(self) -> None:
        """Note that `original` was given a value on purpose."""
        self._module._buffers[self._key] = self.original  # noqa: SLF001 - forward may have assigned another tensor
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes


def changed_by(start: Tensor, change: Tensor) -> Tensor:
    """Return the start plus a change, or the change alone where the start is infinite; a change of 0 keeps all bits.

    >>> changed_by(torch.tensor([1.0, -0.0, -torch.inf]), torch.tensor([0.5, 0.0, 3.0]))
    tensor([1.5000, -0.0000, 3.0000])
    """
    kept = torch.where(change == 0, start, start + change)
    return torch.where(start.isfinite(), kept, change)


def write(buffers: Sequence[Buffer], values: list[Tensor]) -> None:
    """Give buffers new values, in the memory that they had at the start."""
    with torch.no_grad():
        torch._foreach_copy_([buffer.original for buffer in buffers], values)
    for buffer in buffers:
        buffer.written()


class MovingBuffers:
    """The buffers of some models, and their changes in each lane of an update."""

    def __init__(self, models: Sequence[nn.Module], lanes: int, world: World) -> None:
        self._world, self._lanes = world, lanes
        every = sorted(buffers_of(models), key=lambda buffer: str(buffer.now().dtype))
        self._unsaved = [buffer for buffer in every if not buffer.is_persistent]
        # A single lane changes the buffers itself.
        self._buffers = every if lanes > 1 else []
        self.any = bool(self._buffers)
        """Whether there are buffers that several lanes must share."""
        self._known: list[int] = []
        """Numbers of the buffers for which every note has room: the same on all ranks."""
        self._new: list[dict[int, Tensor]] = []
        """For each lane of this update, the changes of other buffers."""

    def begin(self) -> None:
        """Remember all buffers at the start of an update."""
        self._new = []
        for buffer in self._buffers:
            buffer.begin()

    @property
    def known(self) -> list[Buffer]:
        """The buffers that forward changes and that several lanes must share, by dtype."""
        return [self._buffers[number] for number in self._known]

    @property
    def unknown(self) -> list[Buffer]:
        """The buffers that forward has not changed so far."""
        return [buffer for buffer in self._buffers if buffer not in self.known]

    def moves_of_lane(self, *, counts: bool) -> Moves:
        """Return the changes of the known buffers in the forward of one lane; zeros if it does not count."""
        changes = self._changes() if counts else {}
        pieces = []
        for number in self._known:
            zeros = torch.zeros(self._buffers[number].start.numel(), dtype=torch.float64)
            pieces.append(changes.pop(number, zeros))
        self._new.append(changes)
        return torch.cat(pieces).numpy() if pieces else NO_MOVES

    def _changes(self) -> dict[int, Tensor]:
        """Return the changes by the number of the buffer; the host waits for the device twice at most."""
        numbers = [n for n, buffer in enumerate(self._buffers) if buffer.may_have_changed]
        if not numbers:
            return {}
        differs = torch.stack([self._buffers[number].differs() for number in numbers]).tolist()
        changed = [number for number, is_new in zip(numbers, differs, strict=True) if is_new]
        if not changed:
            return {}
        flat = torch.cat([self._buffers[number].change() for number in changed]).cpu()
        sizes = [self._buffers[number].start.numel() for number in changed]
        return dict(zip(changed, torch.split(flat, sizes), strict=True))

    def reset(self) -> None:
        """Undo the changes of a lane, or of a forward that does not count."""
        if changed := [buffer for buffer in self._buffers if buffer.may_have_changed]:
            write(changed, [buffer.start for buffer in changed])

    def not_persistent(self) -> dict[str, Tensor]:
        """Return the buffers that have changed and that are not in a state_dict."""
        found = {}
        for buffer in self._unsaved:
            if buffer.first is not None and not torch.equal(buffer.now(), buffer.first):
                found[f"{PREFIX}{buffer.name}"] = buffer.now()
        return found

    def restore_one(self, name: str, value: Tensor) -> bool:
        """Restore a buffer that `not_persistent` returned; return whether there is one of this name."""
        for buffer in self._unsaved:
            if name == f"{PREFIX}{buffer.name}":
                buffer.now().copy_(value)
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
        moved = [self._buffers[number] for number, total in totals.items() if total.any()]
        if moved:
            flat = torch.cat([total / lanes for total in totals.values() if total.any()])
            parts = torch.split(flat.to(moved[0].start.device), [b.start.numel() for b in moved])
            pairs = zip(moved, parts, strict=True)
            write(moved, [buffer.changed_by(part) for buffer, part in pairs])
            for buffer in moved:
                buffer.remember()

    def apply_new(self, lanes: int) -> None:
        """Change the buffers that lanes of other ranks have changed for the first time. Every rank must call this."""
        self.begin()
        known, self._known = self._known, []
        self.apply(NO_MOVES, lanes, any_new=True)
        self._known = sorted({*known, *self._known})

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


def buffers_of(models: Sequence[nn.Module]) -> Iterator[Buffer]:
    """Yield every buffer once, with its name."""
    seen = set()
    for number, model in enumerate(models):
        for prefix, module in model.named_modules(prefix=str(number) if number else ""):
            for key, value in module._buffers.items():  # noqa: SLF001 - its own, not its children's
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield Buffer(module, key, f"{prefix}.{key}" if prefix else key)
