"""How buffers that forward changes, such as BatchNorm statistics, are updated.

Every lane starts an update with the same buffers, and a buffer changes by the mean of its changes in all lanes, or by
another rule of the user (`RULES`). So the result depends on the lanes, not on the ranks that ran them. Every lane is
examined: a buffer may change in some lanes only, or from a later step on.

A mean suits running statistics and counters of calls. It is wrong for counters of samples and for extremes: torch's
observers of extremes have the rules min and max; integers without a rule that do not grow by one per lane, and other
observers, are refused. What else changes is named once.

A buffer that only becomes longer, such as a rotary table or a mask, is a cache: each rank keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.data.reading.nest import form_of
from paceline.data.reading.source import Batch
from paceline.errors import ConfigError, PacelineError, TrainingError, did_you_mean
from paceline.exact.exchange import TreeShape
from paceline.scale.batch import share
from paceline.world.collectives import all_gather_rows, sum_across
from paceline.world.world import World

_ALWAYS_COMPARED = 1 << 12
"""Elements of a buffer that is compared by value in every lane. Larger ones are compared if they were written to."""
_LARGEST_WHOLE = 1 << 53  # rows are float64, which hold smaller whole numbers exactly

RULES = {
    "mean": "it changes by the mean of the lanes' changes",
    "sum": "it changes by the sum of the lanes' changes",
    "max": "the largest value of all lanes",
    "min": "the smallest value of all lanes",
    "last": "the value of the last lane",
}
"""What a buffer is after an update, elementwise. Lanes without samples do not count."""

PREFIX = "buffer."
"""Begins the names of buffers in a checkpoint that are not in a state_dict."""


class Buffer:
    """One buffer of a model, and its value at the start of the update."""

    def __init__(self, module: nn.Module, key: str, name: str, rule: str = "") -> None:
        self._module, self._key, self.name = module, key, name
        self.rule = rule
        """The user's rule; "" without one."""
        self.is_persistent = key not in module._non_persistent_buffers_set  # noqa: SLF001 - no public way
        self.first = None if self.is_persistent else self.now().clone()
        """The value before the first update, of a buffer that is not in the state_dict."""
        self._is_grown = self._has_changed = False
        self._shape = self.now().shape
        self.remember()

    def remember(self) -> None:
        """Let the current value be that at the start of the next update."""
        self.original = self.now()
        self.start = self.original.clone()
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes

    def now(self) -> Tensor:
        """Return the current value."""
        value = self._module._buffers[self._key]  # noqa: SLF001 - torch has no public table of a module's own buffers
        assert value is not None
        return value

    def grows(self) -> bool:
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

    def begin(self) -> None:
        """Remember the value at the start of an update."""
        if self.is_written and not self.grows():
            self.remember()
        self._shape = self.now().shape

    def differs(self) -> Tensor:
        """Return whether the value differs from that at the start, on the device."""
        if self.now().shape != self.start.shape:
            raise self.shape_error()
        return (self.now() != self.start).any()

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
    def rule_of_class(self) -> str:
        """The rule that is right for a class of torch; "" if there is none."""
        if not self.is_observers:
            return "mean" if self.is_statistic else ""
        observers = sys.modules["torch.ao.quantization"]
        # With a moving average, too, the extreme of the lanes is that of the whole batch. A histogram has bins of its own.
        kinds = observers.MinMaxObserver | observers.PerChannelMinMaxObserver
        extremes = {"min_val": "min", "max_val": "max"}
        return extremes.get(self._key, "") if isinstance(self._module, kinds) else ""

    @property
    def is_cache(self) -> bool:
        """Whether forward has made it longer."""
        return self._is_grown

    @property
    def is_statistic(self) -> bool:
        """Whether it is a statistic of BatchNorm, which writes it without a trace in torch's count of writes."""
        names = {"running_mean", "running_var", "num_batches_tracked"}
        return isinstance(self._module, _NormBase) and self._key in names

    @property
    def is_torchs(self) -> bool:
        """Whether it belongs to a class of torch for which the mean of the changes is right."""
        if self.is_statistic:
            return True
        hooks = self._module._forward_pre_hooks.values()  # noqa: SLF001 - torch has no public list of them
        hooked = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
        return isinstance(self._module, _SpectralNorm) or self._key[:-2] in hooked

    @property
    def is_whole(self) -> bool:
        """Whether it holds integers or truth values."""
        return not self.start.is_floating_point() and not self.start.is_complex()

    def refusal(self) -> ConfigError:
        """Return the error for a buffer that cannot change by a mean."""
        kind, key = type(self._module).__name__, self._key
        what = f"an observer, {kind}, takes extremes" if self.is_observers else "forward counts"
        if not self.is_observers:
            fix = f'give its rule: run.model(model, buffers={{"{key}": "sum"}}), or "max", "min", "last"; or set batch.lanes=1'
        elif self.now().shape != self.start.shape:
            fix = "call model(batch) once before run.model, so that the observer knows its shape; or set batch.lanes=1"
        else:
            fix = (
                "set batch.lanes=1 to train on one rank; or switch the observers off while training: "
                "model.apply(torch.ao.quantization.disable_observer)"
            )
        return ConfigError(
            f"{what} in the buffer {self.name} ({str(self.start.dtype).removeprefix('torch.')}): Paceline changes buffers without "
            "a rule by the mean of the lanes' changes, which would be another number",
            fix=fix,
        )

    def has_changed(self) -> None:
        """Note that it has changed by value: it is not a cache."""
        self._has_changed = True

    def forget(self) -> None:
        """Note that a replay has written the buffer, which torch does not count."""
        self._version = -1

    def follow(self) -> None:
        """Note that the current tensor is the one at the start of an update."""
        self.original = self.now()
        self._version = self.original._version  # noqa: SLF001 - torch's count of writes

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


class _Group:
    """Buffers of one rule and dtype: their values at the start of an update in one flat tensor, which stays where it is."""

    def __init__(self, rule: str, buffers: list[Buffer]) -> None:
        self.rule, self.buffers = rule, buffers
        self._is_whole, dtype = buffers[0].is_whole, buffers[0].start.dtype
        self.adds_changes = rule in {"mean", "sum"}
        """Whether the row of a lane has the changes of the buffers, not their values."""
        self.is_largest = rule in {"max", "min"}
        """Whether the largest number of all lanes counts, not the sum."""
        self.may_be_too_large = rule != "mean" and dtype in {torch.int64, torch.uint64}
        self._sizes = [buffer.start.numel() for buffer in buffers]
        self.start = torch.cat([buffer.start.flatten() for buffer in buffers])
        self._now = torch.empty_like(self.start)
        self._parts, self._parts_now = [], []
        flat = torch.split(self.start, self._sizes), torch.split(self._now, self._sizes)
        for part, now, buffer in zip(*flat, buffers, strict=True):
            buffer.start = part.view(buffer.start.shape)
            self._parts.append(buffer.start)
            self._parts_now.append(now.view(buffer.start.shape))

    def begin(self) -> None:
        """Remember the values at the start of the update."""
        for buffer in self.buffers:
            buffer.follow()
        with torch.no_grad():
            torch._foreach_copy_(self._parts, [buffer.original for buffer in self.buffers])

    @property
    def fits(self) -> bool:
        """Whether all buffers have the shapes that they had."""
        pairs = zip(self.buffers, self._parts, strict=True)
        return all(buffer.now().shape == part.shape for buffer, part in pairs)

    def now(self) -> Tensor:
        """Return the current values, in memory that the next call overwrites."""
        values = []
        for buffer, part in zip(self.buffers, self._parts, strict=True):
            values.append(buffer.now())
            if values[-1].shape != part.shape:
                raise buffer.shape_error()
        with torch.no_grad():
            torch._foreach_copy_(self._parts_now, values)
        return self._now

    def each(self, flat: Tensor) -> Iterator[tuple[Buffer, Tensor]]:
        """Yield every buffer with its part of a flat tensor."""
        yield from zip(self.buffers, torch.split(flat, self._sizes), strict=True)

    @property
    def nothing(self) -> float:
        """What a lane writes that does not count, such as one without samples: added to any number, it changes no bit."""
        return {"mean": 0.0, "sum": 0.0, "last": -0.0}.get(self.rule, -torch.inf)

    def numbers(self) -> Tensor:
        """Return what a lane writes into its row, as flat float64: the changes since the start, or the values.

        Where the start is infinite, the change is the value itself. The smallest value is the largest of -value. Zeros
        lose their sign before they are compared: which of 0.0 and -0.0 is the larger one would depend on the order.
        """
        now = self.now()
        if self.adds_changes and self.rule == "sum" and self._is_whole:
            return (now.long() - self.start.long()).double()
        if self.adds_changes:
            now, start = now.double(), self.start.double()
            return torch.where(start.isfinite(), now - start, now)
        if self.rule == "min":
            return 0.0 - now.double()
        return now.double() + 0.0 if self.rule == "max" else now.double()

    def too_large(self, numbers: Tensor, lanes: int) -> Tensor:
        """Return where float64 may have rounded the numbers of a lane, or would round the sum of that many lanes."""
        return numbers.abs() >= _LARGEST_WHOLE / (lanes if self.rule == "sum" else 1)

    def reset(self) -> None:
        """Undo the changes of a lane."""
        write(self.buffers, self._parts)

    def change_by(self, mean: Tensor) -> None:
        """Give every buffer its value at the start plus a change."""
        self._write(changed_by(self.start.double(), mean))

    def change_to(self, total: Tensor) -> None:
        """Give every buffer its value after an update, by a rule other than the mean; `total` is that of the rows."""
        if self.rule == "sum" and self._is_whole:
            self._write(self.start.long() + total.long())
        elif self.rule == "sum":
            self.change_by(total)
        else:
            value, start = 0.0 - total if self.rule == "min" else total, self.start.double()
            self._write(torch.where(value == start, start, value))  # zeros keep their sign

    def _write(self, values: Tensor) -> None:
        parts = torch.split(values.to(self.start.dtype), self._sizes)
        pairs = zip(parts, self._parts, strict=True)
        write(self.buffers, [value.view(part.shape) for value, part in pairs])


def write(buffers: Sequence[Buffer], values: Sequence[Tensor]) -> None:
    """Give buffers new values, in the memory that they had at the start."""
    with torch.no_grad():
        torch._foreach_copy_([buffer.original for buffer in buffers], list(values))
    for buffer in buffers:
        buffer.written()


def _groups(buffers: Sequence[Buffer]) -> list[_Group]:
    """Return buffers by rule, dtype and device: first those whose numbers are added."""

    def kind(buffer: Buffer) -> tuple[bool, str, str, str]:
        rule = buffer.rule or "mean"
        return rule in {"max", "min"}, rule, str(buffer.now().dtype), str(buffer.now().device)

    groups = groupby(sorted(buffers, key=kind), kind)
    return [_Group(rule, list(same)) for (_, rule, *_), same in groups]


class MovingBuffers:
    """The buffers of some models, and their changes in each lane of an update.

    Known buffers have columns in every row, the same on all ranks: BatchNorm's and those with a rule from the start,
    others from the first update that changes them. They are handled by few operations for all. The others are compared in every lane: small
    ones by value, large ones if torch counts a write.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        lanes: int,
        world: World,
        rules: Sequence[Mapping[str, str]] | None = (),
    ) -> None:
        self._world, self._lanes = world, lanes
        every = sorted(buffers_of(models, rules or ()), key=lambda buffer: str(buffer.now().dtype))
        for buffer in every if rules is not None else ():
            buffer.rule = buffer.rule or buffer.rule_of_class
            if buffer.rule == "mean" and buffer.is_whole and not buffer.is_statistic:
                buffer.rule = ""  # a mean may have a fraction: it is judged when it changes
        self._unsaved = [buffer for buffer in every if not buffer.is_persistent]
        # A single lane changes the buffers itself.
        self.every = every if lanes > 1 else []
        self._known = [
            n for n, buffer in enumerate(self.every) if buffer.rule or buffer.is_statistic
        ]
        self._collect()
        self._seen: list[tuple[list[tuple[_Group, Tensor]], dict[int, Tensor]]] = []
        """For each lane of this update, the values of other buffers: of small ones by group, of large ones that were written."""
        self._growths: set[Hashable] = set()
        """The names of caches, and the forms of the batches for which they became longer."""
        self._counters: set[int] = set()
        """Numbers of the buffers outside of torch that count the forwards."""
        self._divisors: dict[int, Tensor] = {}
        self.named: list[str] = []
        """Names of averaged buffers, for which it is not sure that the mean is right, until the run has said them."""

    def _collect(self) -> None:
        """Put the buffers into groups."""
        known = set(self._known)
        others = [n for n in range(len(self.every)) if n not in known]
        small = [n for n in others if self._is_compared(self.every[n])]
        self.groups = _groups([self.every[number] for number in self._known])
        self._small = _groups([self.every[number] for number in small])
        self._large = [n for n in others if n not in set(small)]
        self.columns = sum(len(group.start) for group in self.groups)
        """Numbers that a row has for the known buffers."""
        self.largest = sum(len(group.start) for group in self.groups if group.is_largest)
        """How many of these, at the end, are not added: the largest one of all lanes counts."""

    @staticmethod
    def _is_compared(buffer: Buffer) -> bool:
        return buffer.now().numel() <= _ALWAYS_COMPARED and not buffer.is_cache

    def begin(self) -> None:
        """Remember all buffers at the start of an update."""
        self._seen = []
        if not self.every:
            return
        groups = (*self.groups, *self._small)
        if not all(group.fits for group in groups):
            # Forward made a cache longer after the last look, or the script gave a buffer another shape.
            for buffer in (buffer for group in groups for buffer in group.buffers):
                buffer.begin()
            self._collect()
        for group in (*self.groups, *self._small):
            group.begin()
        for number in self._large:
            self.every[number].begin()

    @property
    def unknown(self) -> list[Buffer]:
        """The buffers that forward has not changed so far."""
        known = {id(buffer) for group in self.groups for buffer in group.buffers}
        return [buffer for buffer in self.every if id(buffer) not in known]

    def _each_group(self, columns: Tensor) -> Iterator[tuple[_Group, Tensor]]:
        """Yield every group of known buffers with its columns."""
        if self.groups:
            sizes = [len(group.start) for group in self.groups]
            yield from zip(self.groups, torch.split(columns, sizes), strict=True)

    def take(self, columns: Tensor, flag: Tensor, *, counts: bool, is_last: bool) -> None:
        """Write what the forward of one lane has made of the known buffers; set the flag if a number is too large.

        Whether the lane counts, and is the last one that does, is the same in all replays of a CUDA graph.
        """
        flags = []
        for group, place in self._each_group(columns):
            if not counts or (group.rule == "last" and not is_last):
                place.fill_(group.nothing)
                continue
            numbers = group.numbers()
            if group.may_be_too_large:
                is_too_large = group.too_large(numbers, self._lanes)
                numbers = numbers.masked_fill(is_too_large, torch.nan)  # and so in the total
                flags.append(is_too_large.any().to(flag.device))
            place.copy_(numbers)
        if flags:
            flag.copy_(torch.stack(flags).any())

    def examine(self, batch: Batch, flag: Tensor, *, counts: bool) -> None:
        """Set the flag of a lane if its forward changed a buffer that has no columns yet."""
        if not (self._small or self._large):
            return
        if any([buffer.grows() for group in self._small for buffer in group.buffers]):  # noqa: C419 - ask all
            self._collect()  # without the buffers that became longer: they are caches
        self._refuse_queues(batch)
        values = [(group, group.now().clone()) for group in self._small]
        differ = [(now != group.start).any() for group, now in values]
        large = {}
        for number in self._large:
            buffer = self.every[number]
            if buffer.is_written and not buffer.grows():
                differ.append(buffer.differs())
                large[number] = buffer.now().detach().clone()
        if not counts or not differ:
            self._seen.append(([], {}))
            return
        flag.add_(torch.stack([each.to(flag.device) for each in differ]).any())
        self._seen.append((values, large))

    def _refuse_queues(self, batch: Batch) -> None:
        """Raise if a buffer became longer twice for batches of one form: it holds samples, and is no cache."""
        for buffer in self._unsaved:
            if buffer.take_growth():
                growth = buffer.name, form_of(batch)
                if growth in self._growths:
                    raise buffer.shape_error()
                self._growths.add(growth)

    def reset(self, *, only_known: bool = False) -> None:
        """Undo the changes of a lane, or of a forward that does not count."""
        for group in self.groups if only_known else (*self.groups, *self._small):
            group.reset()
        for number in () if only_known else self._large:
            buffer = self.every[number]
            if buffer.is_written and not buffer.grows():
                write([buffer], [buffer.start])

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

    def apply(self, total: Tensor, lanes: int) -> None:
        """Change the known buffers by their rules over the lanes that had samples; `total` is that of the rows."""
        for group, columns in self._each_group(total):
            sums = columns.to(group.start.device)
            if group.rule != "mean":
                group.change_to(sums)
                continue
            # A tensor on the device: CUDA multiplies by the reciprocal of a Python number.
            group.change_by(sums / self.divisor(lanes, sums))

    def divisor(self, lanes: int, like: Tensor) -> Tensor:
        """Return a number of lanes as a tensor, which is kept: a CUDA graph reads its memory."""
        if lanes not in self._divisors:
            self._divisors[lanes] = like.new_tensor(float(lanes))
        return self._divisors[lanes]

    def refuse_miscounts(self, total: Tensor, lanes: int) -> None:
        """Raise if a buffer that counts the forwards has counted something else."""
        for group, columns in self._each_group(total) if self._counters else ():
            for buffer, sums in group.each(columns):
                is_counter = self.every.index(buffer) in self._counters
                if is_counter and float(sums[0]) not in {0.0, float(lanes)}:
                    raise buffer.refusal()

    def refuse_too_large(self, total: Tensor) -> None:
        """Raise if a lane has left a whole number that a row cannot hold: it is nan in the total."""
        for group, columns in self._each_group(total):
            for buffer, numbers in group.each(columns) if group.may_be_too_large else ():
                if bool(numbers.isnan().any()):
                    raise self.too_large([buffer])

    def too_large(self, buffers: Sequence[Buffer] = ()) -> TrainingError:
        """Return the error for whole numbers that a row cannot hold; if it is not known in which, name all that may be."""
        groups = [group for group in self.groups if group.may_be_too_large]
        found = buffers or [buffer for group in groups for buffer in group.buffers]
        names = " or ".join(f"{buffer.name} ({buffer.rule})" for buffer in found)
        return TrainingError(
            f"forward left a whole number of 2^53 or more in the buffer {names}, which the lanes' rows of float64 cannot hold exactly",
            fix="keep smaller numbers in it, or set batch.lanes=1 to train on one rank",
        )

    def apply_new(self, lanes: int) -> None:
        """Change the buffers that a lane of some rank has changed for the first time. Every rank must call this."""
        totals = self._agree_on_new(lanes)
        for number, total in totals.items():
            buffer = self.every[number]
            if total.any():
                mean = (total / lanes).to(buffer.start.device)
                changed = changed_by(buffer.start.double(), mean.view(buffer.start.shape))
                write([buffer], [changed])
            buffer.remember()
            buffer.has_changed()
        self._known = sorted({*self._known, *totals})
        self._collect()

    def _new_changes(self) -> list[dict[int, Tensor]]:
        """Return the changes of the buffers without columns in each lane of this rank, by the number of the buffer."""
        found: list[dict[int, Tensor]] = []
        for values, large in self._seen:
            changes = {}
            for group, now in values:
                for buffer, value in group.each(now):
                    start = buffer.start.flatten()
                    if bool((value != start).any()):
                        changes[self.every.index(buffer)] = _change(value, start)
            for number, value in large.items():
                start = self.every[number].start
                if bool((value != start).any()):
                    changes[number] = _change(value.flatten(), start.flatten())
            found.append(changes)
        return found

    def _agree_on_new(self, lanes: int) -> dict[int, Tensor]:
        """Return the changes of new buffers, added over all lanes along the tree. Every rank calls this.

        Only the first lanes have samples.
        """
        new = self._new_changes()
        seen = torch.zeros(len(self.every), dtype=torch.float64)
        for changes in new:
            seen[list(changes)] = 1.0
        found = [int(n) for n in sum_across(self._world, seen).nonzero().flatten().tolist()]
        sizes = [self.every[number].start.numel() for number in found]
        most = len(share(self._lanes, 0, self._world.size))
        rows = torch.zeros(most, sum(sizes), dtype=torch.float64)
        for row, changes in zip(rows, new, strict=False):
            for number, place in zip(found, torch.split(row, sizes), strict=True):
                if number in changes:
                    place.copy_(changes[number])
        every = self._by_lane(all_gather_rows(self._world, rows))
        whole = torch.stack(every)  # a copy: the sum overwrites the rows
        total = self._add_up(every)
        for number, of_lanes in zip(found, torch.split(whole, sizes, dim=1), strict=True):
            self._judge(number, of_lanes, lanes)
        return dict(zip(found, torch.split(total, sizes), strict=True))

    def _judge(self, number: int, changes: Tensor, lanes: int) -> None:
        """Refuse a buffer for which a mean is wrong; note the name of one for which it may be. All ranks see the same."""
        buffer = self.every[number]
        if buffer.is_torchs:
            return
        if buffer.start.is_complex():
            raise _complex(buffer.name)
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


def buffers_of(
    models: Sequence[nn.Module], rules: Sequence[Mapping[str, str]] = ()
) -> Iterator[Buffer]:
    """Yield every buffer once, with its name; `rules` has those of each model."""
    seen = set()
    for number, model in enumerate(models):
        own_rules = rules[number] if number < len(rules) else {}
        for prefix, module in model.named_modules():
            for key, value in module._buffers.items():  # noqa: SLF001 - its own, not its children's
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    own = f"{prefix}.{key}" if prefix else key
                    name = f"{number}.{own}" if number else own
                    yield Buffer(module, key, name, rule_of(own, own_rules))


def rule_of(name: str, rules: Mapping[str, str]) -> str:
    """Return the last rule that matches the name of a buffer, or the last part of it; "" if none does.

    >>> rules = {"load": "sum", "layers.*.load": "last"}
    >>> rule_of("load", rules), rule_of("layers.0.load", rules), rule_of("payload", rules)
    ('sum', 'last', '')
    """
    own = name.rpartition(".")[2]
    found = [rule for key, rule in rules.items() if fnmatchcase(name, key) or fnmatchcase(own, key)]
    return found[-1] if found else ""


def refuse_wrong_rules(model: nn.Module, rules: Mapping[str, str]) -> None:
    """Raise if a rule does not exist, or matches no buffer of the model, or none that can follow it."""
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f"run.model got buffers={rules!r}, which is no dict of rules by name",
            fix='call run.model(model, buffers={"load": "sum"})',
        )
    buffers = dict(model.named_buffers())
    for key, rule in rules.items():
        if rule not in RULES:
            raise ConfigError(
                f"run.model got buffers={{{key!r}: {rule!r}}}, which is no rule",
                fix=did_you_mean(str(rule), RULES),
            )
        if not any(rule_of(name, {key: rule}) for name in buffers):
            raise ConfigError(
                f"run.model got buffers={{{key!r}: {rule!r}}}, but no buffer of this {type(model).__name__} has this name",
                fix=did_you_mean(key, buffers)
                if buffers
                else "remove it: the model has no buffers",
            )
    for name, buffer in buffers.items():
        rule = rule_of(name, rules)
        if rule == "sum" and buffer.dtype == torch.bool:
            raise ConfigError(
                f"the buffer {name} holds truth values, which have no sum",
                fix=f'set buffers={{"{name}": "max"}} (true in some lane), or "min" (true in all)',
            )
        if rule and buffer.is_complex():
            raise _complex(name)


def _complex(name: str) -> ConfigError:
    return ConfigError(
        f"the buffer {name} holds complex numbers, which forward may change in a single lane only",
        fix="keep the real and the imaginary parts: torch.view_as_real(value); or set batch.lanes=1",
    )


def _change(value: Tensor, start: Tensor) -> Tensor:
    """Return the change of a flat buffer as float64 on the host; where the start is infinite, the value itself."""
    if value.is_complex():
        value, start = value.real, start.real  # `_judge` refuses it, on all ranks
    value, start = value.cpu().double(), start.cpu().double()
    return torch.where(start.isfinite(), value - start, value)


def unfit_for_capture(buffers: Mapping[str, Tensor]) -> str:
    """Return why a CUDA graph cannot change these buffers as an eager step does; "" if it can."""
    for name, buffer in buffers.items():
        values = buffer.double()
        if not values.isfinite().all():
            return f"the buffer {name} is not finite"
        if not buffer.is_floating_point() and bool((values.abs() > _LARGEST_WHOLE).any()):
            return f"the buffer {name} has whole numbers above 2^53"
    return ""
