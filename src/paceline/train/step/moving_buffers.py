"""How buffers that forward changes, such as BatchNorm statistics, are updated.

Every lane starts an update with the same buffers, and a buffer changes by the mean of its changes in all lanes. So
the result depends on the lanes, not on the ranks that ran them. Every lane is examined: a buffer may change in some
lanes only, or from a later step on.

A mean suits running statistics and counters of calls. It is wrong for counters of samples and for extremes: integers
that do not grow by one per lane, and torch's observers, are refused. What else changes is named once.

A buffer that only becomes longer, such as a rotary table or a mask, is a cache: each rank keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.data.reading.nest import form_of
from paceline.data.reading.source import Batch
from paceline.errors import ConfigError, PacelineError, TrainingError
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
        self._is_grown = self._has_changed = False
        self._shape = self.now().shape
        self._always_compared = is_statistic or self.now().numel() <= _ALWAYS_COMPARED
        self.remember()

    def remember(self) -> None:
        """Let the current value be that at the start of the next update."""
        self.original = self.now()
        self.start = self.original.clone()
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes

    def begin(self) -> None:
        """Remember the value at the start of an update."""
        if self.may_have_changed and not self._grows():
            self.remember()
        self._shape = self.now().shape

    def now(self) -> Tensor:
        """Return the current value."""
        value = self._module._buffers[self._key]  # noqa: SLF001 - torch has no public table of a module's own buffers
        assert value is not None
        return value

    @property
    def may_have_changed(self) -> bool:
        """Whether the values must be compared to know."""
        return not self._is_grown and (self._always_compared or self.is_written)

    def _grows(self) -> bool:
        """Return whether this is a cache of which forward has made a longer one; that one is kept from now on."""
        now = self.now()
        if now.shape != self.start.shape and not self.is_persistent and not self._has_changed:
            self._is_grown = self._is_grown or _continues(self.start, now)
        return self._is_grown

    @property
    def is_written(self) -> bool:
        """Whether it was assigned or written since the start, as far as torch knows."""
        now = self.now()
        return now is not self.original or now._version != self._version  # noqa: SLF001 - torch's count of writes

    def take_growth(self) -> bool:
        """Return whether forward has made this cache longer since the last look."""
        if not self._is_grown or self.now().shape == self._shape:
            return False
        self._shape = self.now().shape
        return True

    def shape_error(self) -> PacelineError:
        """Return the error for a buffer that has another shape and is no cache."""
        if self.is_observers:
            return self.refusal()
        return TrainingError(
            f"forward changed the shape of the buffer {self.name} from {list(self.start.shape)} to {list(self.now().shape)}",
            fix="give it its final shape in __init__, or keep it outside of the model and track it with run.track",
        )

    def differs(self) -> Tensor:
        """Return whether the value differs from that at the start, on the device."""
        now = self.now()
        if self._grows():
            return torch.zeros((), dtype=torch.bool, device=now.device)
        if now.shape != self.start.shape:
            raise self.shape_error()
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

    @property
    def is_observers(self) -> bool:
        """Whether it belongs to an observer of torch, which takes extremes."""
        quantization = sys.modules.get(
            "torch.ao.quantization"
        )  # a model that has one has imported it
        if quantization is None:
            return False
        return isinstance(self._module, quantization.ObserverBase | quantization.FakeQuantizeBase)

    @property
    def is_torchs(self) -> bool:
        """Whether it belongs to a class of torch for which the mean of the changes is right."""
        if isinstance(self._module, _NormBase):
            return self._key in {"running_mean", "running_var", "num_batches_tracked"}
        hooks = self._module._forward_pre_hooks.values()  # noqa: SLF001 - torch has no public list of them
        hooked = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
        return isinstance(self._module, _SpectralNorm) or self._key[:-2] in hooked

    @property
    def is_whole(self) -> bool:
        """Whether it holds integers or truth values."""
        return not self.start.is_floating_point() and not self.start.is_complex()

    def refusal(self) -> ConfigError:
        """Return the error for a buffer that cannot change by a mean."""
        kind = type(self._module).__name__
        what = f"an observer, {kind}, takes extremes" if self.is_observers else "forward counts"
        return ConfigError(
            f"{what} in the buffer {self.name} ({str(self.start.dtype).removeprefix('torch.')}): Paceline changes buffers by the mean "
            "of the lanes' changes, which would be another number",
            fix="set batch.lanes=1 to train on one rank; or "
            + (
                "switch the observers off while training: model.apply(torch.ao.quantization.disable_observer)"
                if self.is_observers
                else 'let the loss return it: {"loss": ..., "load": (sum, count)}, and add it up in the loop'
            ),
        )

    def has_changed(self) -> None:
        """Note that it has changed by value: it is not a cache."""
        self._has_changed = True

    def forget(self) -> None:
        """Note that a replay has written the buffer, which torch does not count."""
        self._version = -1

    def written(self) -> None:
        """Note that `original` was given a value on purpose."""
        self._module._buffers[self._key] = self.original  # noqa: SLF001 - forward may have assigned another tensor
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes


def _continues(before: Tensor, now: Tensor) -> bool:
    """Return whether a tensor of another shape has the same values, from the first or from the last one on.

    >>> before = torch.tensor([[1.0, 2.0]])
    >>> _continues(before, torch.tensor([[1.0, 2.0, 3.0]])), _continues(before, torch.tensor([[2.0, 3.0, 4.0]]))
    (True, False)
    """
    if not before.numel():
        return True
    if before.ndim != now.ndim or before.dtype != now.dtype:
        return False
    sizes = [min(pair) for pair in zip(before.shape, now.shape, strict=True)]
    for at_end in (False, True):
        one, other = (
            each[
                tuple(
                    slice(whole - size, whole) if at_end else slice(size)
                    for whole, size in zip(each.shape, sizes, strict=True)
                )
            ].double()
            for each in (before, now)
        )
        if torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True):
            return True
    return False


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
        self._growths: set[Hashable] = set()
        """The names of caches, and the forms of the batches for which they became longer."""
        self._counters: set[int] = set()
        """Numbers of the buffers outside of torch that count the forwards."""
        self.named: list[str] = []
        """Names of averaged buffers, for which it is not sure that the mean is right, until the run has said them."""

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

    def moves_of_lane(self, batch: Batch, *, counts: bool) -> Moves:
        """Return the changes of the known buffers in the forward of one lane; zeros if it does not count."""
        changes = self._changes() if counts else {}
        self._refuse_queues(batch)
        pieces = []
        for number in self._known:
            zeros = torch.zeros(self._buffers[number].start.numel(), dtype=torch.float64)
            pieces.append(changes.pop(number, zeros))
        self._new.append(changes)
        return torch.cat(pieces).numpy() if pieces else NO_MOVES

    def _refuse_queues(self, batch: Batch) -> None:
        """Raise if a buffer became longer twice for batches of one form: it holds samples, and is no cache."""
        for buffer in self._buffers:
            if buffer.take_growth():
                growth = buffer.name, form_of(batch)
                if growth in self._growths:
                    raise buffer.shape_error()
                self._growths.add(growth)

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
            if buffer.first is None or buffer.now().shape != buffer.first.shape:
                continue  # saved with the model; or a cache, which grows again
            if not torch.equal(buffer.now(), buffer.first):
                found[f"{PREFIX}{buffer.name}"] = buffer.now()
        return found

    def restore_one(self, name: str, value: Tensor) -> bool:
        """Restore a buffer that `not_persistent` returned; return whether there is one of this name."""
        for buffer in self._unsaved:
            if name == f"{PREFIX}{buffer.name}":
                if value.shape == buffer.now().shape:  # otherwise a cache
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
        for number in self._counters & totals.keys():
            if float(totals[number]) not in {0.0, float(lanes)}:
                raise self._buffers[number].refusal()
        if any_new:
            totals |= self._agree_on_new(lanes)
        changed = [number for number, total in totals.items() if total.any()]
        moved = [self._buffers[number] for number in changed]
        if moved:
            flat = torch.cat([totals[number] / lanes for number in changed])
            parts = torch.split(flat.to(moved[0].start.device), [b.start.numel() for b in moved])
            pairs = zip(moved, parts, strict=True)
            write(moved, [buffer.changed_by(part) for buffer, part in pairs])
            for buffer in moved:
                buffer.remember()
                buffer.has_changed()

    def apply_new(self, lanes: int) -> None:
        """Change the buffers that lanes of other ranks have changed for the first time. Every rank must call this."""
        self.begin()
        known, self._known = self._known, []
        self.apply(NO_MOVES, lanes, any_new=True)
        self._known = sorted({*known, *self._known})

    def _agree_on_new(self, lanes: int) -> dict[int, Tensor]:
        """Return the changes of new buffers, added over all lanes along the tree. Every rank calls this.

        Only the first lanes have samples.
        """
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
        every = self._by_lane(all_gather_rows(self._world, rows))
        whole = torch.stack(every)  # a copy: the sum overwrites the rows
        total = self._add_up(every)
        for number, of_lanes in zip(found, torch.split(whole, sizes, dim=1), strict=True):
            self._judge(number, of_lanes, lanes)
        self._known = sorted({*self._known, *found})
        return dict(zip(found, torch.split(total, sizes), strict=True))

    def _judge(self, number: int, changes: Tensor, lanes: int) -> None:
        """Refuse a buffer for which a mean is wrong; note the name of one for which it may be. All ranks see the same."""
        buffer = self._buffers[number]
        if buffer.is_torchs:
            return
        counts_calls = changes.shape[1] == 1 and float(changes.sum()) == lanes == int(
            (changes == 1).sum()
        )
        if buffer.is_observers or (buffer.is_whole and not counts_calls):
            raise buffer.refusal()
        if buffer.is_whole:
            self._counters.add(number)
        else:
            self.named.append(buffer.name)

    def _by_lane(self, rows_of_ranks: Tensor) -> list[Tensor]:
        """Return the rows of all lanes."""
        lanes: list[Tensor] = []
        for rank, rows in enumerate(rows_of_ranks):
            lanes += list(rows[: len(share(self._lanes, rank, self._world.size))])
        return lanes

    def _add_up(self, lanes: list[Tensor]) -> Tensor:
        """Add the rows of all lanes along the tree."""
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
