"""Changes of a dataset by the loop, which reach its samples too late, or never, and are lost in a resume: refused by name.

A dataset may change itself while it is read (a counter, a cache, a file that it opens), so only what changes between two
reads is looked at. A step in which nothing has changed costs one comparison of references per attribute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.data.reading.batches import Batches
from paceline.data.reading.source import (
    DatasetSource,
    Sampled,
    TensorSource,
    epoch_targets,
    parts_of,
    set_epoch_keyed,
)
from paceline.data.reading.transform import Transformed
from paceline.errors import ConfigError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic)


class DatasetChanges:
    """Compares the attributes of a training's dataset between two reads."""

    def __init__(self, batches: Batches, tracked: Iterable[Any]) -> None:
        self._batches, self._workers = batches, batches.config.read.workers
        self._dataset, collate, tensors = _parts_of(batches.source)
        # A tracked dataset is restored with the run, and without workers the next read sees its changes.
        restored = [] if self._workers else list(tracked)
        held = {id(value) for each in restored for value in getattr(each, "__dict__", {}).values()}
        self._tensors = [value for value in tensors if id(value) not in held]
        roots = [each for each in (self._dataset, collate) if each is not None]
        self._objects = parts_of(roots, {id(each) for each in restored})
        self._before: list[_Attributes] = []
        self._versions: list[int] = []
        self._changed_by_reading: set[str] = set()

    def remember(self) -> None:
        """Take the attributes as they are: the samples of a step were just read."""
        if not self._before or not all(each.are_same for each in self._before):
            self._before = [_Attributes(each) for each in self._objects]
        self._versions = [value._version for value in self._tensors]  # noqa: SLF001 - torch's count of writes

    def refuse(self, epochs: Sequence[int]) -> None:
        """Raise if the loop has changed an attribute, except to what `set_epoch` of one of these epochs makes it."""
        for number, (value, version) in enumerate(zip(self._tensors, self._versions, strict=False)):
            if value._version != version:  # noqa: SLF001
                raise _tensor_error(number)
        if all(each.are_same for each in self._before):
            return
        changed = self._changed()
        if not changed or self._is_set_epoch(epochs):
            return
        changed = [name for name in changed if name not in self._names_that_reading_changes()]
        if changed:
            raise self._error(changed[0])

    @contextlib.contextmanager
    def reading(self, epochs: Sequence[int]) -> Iterator[None]:
        """Allow the dataset to change itself while an evaluation reads it."""
        self.refuse(epochs)
        yield
        if self._before:
            self.remember()

    def _changed(self) -> list[str]:
        return [name for each in self._before for name in each.changed()]

    def _is_set_epoch(self, epochs: Sequence[int]) -> bool:
        """Return whether the script has only called `set_epoch` as Paceline does."""
        if not epoch_targets(self._dataset):
            return False
        self._batches.forget_epoch()
        by_script = [_Attributes(each) for each in self._objects]
        for epoch in epochs:
            set_epoch_keyed(self._dataset, (self._batches.config.seed, epoch))
            if not any(each.changed() for each in by_script):
                return True
        return False

    def _names_that_reading_changes(self) -> set[str]:
        """Read a sample, as the script may have done: what that changes is not the loop's."""
        before = [_Attributes(each) for each in self._objects]
        with contextlib.suppress(Exception):  # the error of a sample is for the reader to show
            self._dataset[0]
        self._changed_by_reading |= {name for each in before for name in each.changed()}
        return self._changed_by_reading

    def _error(self, name: str) -> ConfigError:
        late = "one step late" if not self._workers else "never, because its workers have copies"
        problem = (
            f"the loop changed {name}: samples see that {late}, and a resumed run does not know it"
        )
        if epoch_targets(self._dataset):
            fix = "remove that from the loop: Paceline calls set_epoch(epoch) of the dataset, from epoch 0, before the first "
            return ConfigError(problem, fix=f"{fix}sample of each epoch is read, also in workers")
        fix = "give the dataset a method set_epoch(self, epoch) that sets it: Paceline calls it before the first sample of "
        fix += "each epoch is read, also in workers"
        if not self._workers:
            fix += "; or give it state_dict and load_state_dict, and call run.track(data=dataset)"
        return ConfigError(problem, fix=fix)


def _tensor_error(number: int) -> ConfigError:
    return ConfigError(
        f"the loop wrote to tensor {number} of the dataset, and a resumed run does not know the new values",
        fix="pass a dataset with __len__, __getitem__ and a method set_epoch(self, epoch) that makes them: Paceline calls it "
        "before the first sample of each epoch is read; or track an object that holds the tensor: run.track(labels=holder)",
    )


class _Attributes:
    """The attributes of an object at one moment."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._table = owner, vars(owner)
        self._names, self._values = list(self._table), list(self._table.values())
        self._sizes = [len(value) if type(value) is list else -1 for value in self._values]
        self._versions = [value._version if _is_tensor(value) else 0 for value in self._values]  # noqa: SLF001
        self._in_place = [
            place
            for place, value in enumerate(self._values)
            if type(value) is list or _is_tensor(value)
        ]
        self._may_be_replaced = not callable(getattr(owner, "set_epoch", None))
        """Whether an object that is not data counts: `set_epoch` may make a new generator each time."""

    @property
    def are_same(self) -> bool:
        """Whether nothing was assigned, appended or written to, by references."""
        now = self._table.values()
        return (
            len(now) == len(self._values)
            and all(map(is_, now, self._values))
            and not any(map(self._is_written, self._in_place))
        )

    def _is_written(self, place: int) -> bool:
        value = self._values[place]
        if type(value) is list:
            return len(value) != self._sizes[place]
        return bool(value._version != self._versions[place])  # noqa: SLF001

    def changed(self) -> list[str]:
        """Return the names of the attributes that have another value."""
        if self.are_same:
            return []
        kind = type(self._owner)
        found = []
        for place, (name, before) in enumerate(zip(self._names, self._values, strict=True)):
            now = self._table.get(name)
            if self._differs(before, now) or (place in self._in_place and self._is_written(place)):
                found.append(name)
        new = sorted(self._table.keys() - set(self._names))
        found += [name for name in new if hasattr(kind, name)]  # the class had its value until now
        return [f"{kind.__name__}.{name}" for name in found]

    def _differs(self, before: Any, now: Any) -> bool:
        if before is now:
            return False
        if _is_data(before) and _is_data(now):
            return not _equal(before, now)
        is_opened = before is None and not callable(now)  # a file, at the first read
        return self._may_be_replaced and not is_opened


def _parts_of(source: Any) -> tuple[Any, Any, list[Tensor]]:
    """Return the dataset, the collate function and the tensors of a source, without its wrappers."""
    while isinstance(source, Sampled | Transformed):
        source = source.source
    if not isinstance(source, TensorSource | DatasetSource):
        return None, None, []
    dataset = source.dataset if isinstance(source, DatasetSource) else source
    tensors = [dataset] if isinstance(dataset, Tensor) else getattr(dataset, "tensors", ())
    tensors = [value for value in tensors if _is_tensor(value)]
    if isinstance(source, TensorSource):
        return None, None, tensors
    return source.dataset, source.collate, tensors


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _is_data(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, list, tuple, dict, set, frozenset, numpy.ndarray, Tensor))


def _equal(one: Any, other: Any) -> bool:  # noqa: PLR0911 - one for each kind
    """Return whether two values are equal, also inside of lists; two objects that are not data count as equal.

    >>> _equal([1, numpy.ones(2)], [1, numpy.ones(2)]), _equal({"p": 0.1}, {"p": 0.2}), _equal(float("nan"), float("nan"))
    (True, False, True)
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return (
            one.dtype == other.dtype
            and one.tobytes() == other.tobytes()
            and one.shape == other.shape
        )
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and type(one) is type(other):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if _is_data(one) or _is_data(other):
        return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - nan
    return True
