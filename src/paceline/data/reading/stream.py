"""Streams of samples, one per lane, so that a stream does not depend on the world: `Stream`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy

from paceline.config import RunConfig
from paceline.data.reading.collate import Collate, stack
from paceline.data.reading.readers import GroupLanes
from paceline.data.reading.resident import copy_to_device
from paceline.data.reading.schedule import StepGroup
from paceline.data.reading.source import Batch, set_epoch
from paceline.errors import ConfigError
from paceline.scale.batch import BatchPlan, split_evenly
from paceline.world.randomness import seed_everything

Factory = Callable[[int, int], Iterable[Any]]
"""factory(shard, shards) -> the samples of one shard."""

_PASS, _SAMPLE, _COLLATE = 1, 2, 3  # keep the randomness of each apart


class Stream:
    """Samples without numbers, one shard per lane on any number of ranks, for `run.steps`.

    - `factory`: `factory(shard, shards)` returns an iterable of the samples of one shard.
    - `samples`: the number of samples of an epoch, rounded up to whole steps; without it, the run needs `steps=`.
    - `use_state`: continue a resumed run from the `state_dict` of the iterables, instead of skipping what was read. They
      must restore themselves exactly; the shuffle buffer of Hugging Face datasets, for example, does not.

    A shard that ends starts again: the factory is called once more, and `set_epoch(pass)` of
    what it returns, if it has that. So every step has a full batch.

    >>> def numbers(shard, shards):
    ...     return range(shard, 100, shards)
    >>> stream = Stream(numbers, samples=100)
    """

    bytes_per_sample = 0
    """Unknown."""

    def __init__(
        self, factory: Factory, samples: int | None = None, *, use_state: bool = False
    ) -> None:
        if samples is not None and samples < 1:
            raise ConfigError(
                f"samples of a stream must be >= 1, got {samples}",
                fix="leave samples= out, and set steps=",
            )
        self._factory, self._samples, self.use_state = factory, samples, use_state
        self._open: dict[int, _Shard] = {}
        self._restored: dict[str, Any] = {}

    @property
    def is_endless(self) -> bool:
        """Whether its length is unknown."""
        return self._samples is None

    def samples_per_epoch(self, config: RunConfig) -> int:
        """Return the samples of an epoch, whole steps; without `samples`, of the whole run."""
        batch = config.batch.global_size
        if self._samples is not None:
            return -(-self._samples // batch) * batch
        if config.steps:
            return config.steps * batch
        raise ConfigError(
            "the stream has no length, and steps=0",
            fix="set steps=, or pass the samples of an epoch: Stream(factory, samples=1_000_000)",
        )

    def state(self) -> dict[str, Any]:
        """Return the state of this rank's lanes after the last step that was read.

        The states of all ranks, in one dictionary, are for `restore`.
        """
        return {str(lane): shard.state() for lane, shard in self._open.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue from the states of all lanes when the next steps are read."""
        self._restored = dict(states)

    def open(self, lane: int, lanes: int, seed: int, taken: int) -> _Shard:
        """Return the stream of a lane, after `taken` samples."""
        shard = _Shard(self._factory, lane, lanes, seed)
        state = self._restored.get(str(lane))
        if state is not None:
            shard.restore(state, taken)
        shard.skip_to(taken)
        self._open[lane] = shard
        return shard

    def close(self) -> None:
        """End the iterators; the state stays."""
        for shard in self._open.values():
            shard.close()


class _Shard:
    """The samples of one shard, pass after pass."""

    def __init__(self, factory: Factory, shard: int, shards: int, seed: int) -> None:
        self._factory, self._shard, self._shards = factory, shard, shards
        self._seed = seed
        self._taken = self._pass = 0
        self._iterable: Any = None
        self._iterator: Iterator[Any] | None = None
        self._nothing_yet = True  # no sample in this pass

    def take(self, count: int) -> list[Any]:
        """Return the next samples."""
        return [self._next() for _ in range(count)]

    def skip_to(self, taken: int) -> None:
        """Read until this many samples were taken in all."""
        while self._taken < taken:
            self._next()

    def seed_collate(self) -> None:
        """Seed all generators for the samples that were just taken."""
        seed_everything(self._seed, _COLLATE, self._shard, self._taken)

    def state(self) -> dict[str, Any]:
        """Return the position, and the state of the iterable if it has one."""
        inner = None
        if self._iterator is not None and _has_state(self._iterable):
            inner = copy.deepcopy(self._iterable.state_dict())  # it may be the live state
        return {"taken": self._taken, "pass": self._pass, "shards": self._shards, "inner": inner}

    def restore(self, state: Mapping[str, Any], most: int) -> None:
        """Continue from a state, unless it cannot be loaded or is beyond `most` samples."""
        if state["shards"] != self._shards:
            raise ConfigError(
                f"the stream was saved with {state['shards']} lanes, and batch.lanes={self._shards}",
                fix=f"set batch.lanes={state['shards']}",
            )
        if state["inner"] is None or state["taken"] > most:
            return
        self._taken, self._pass = state["taken"], state["pass"]
        self._begin_pass(state["inner"])
        self._nothing_yet = False

    def close(self) -> None:
        """End a generator, which may hold files open."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _next(self) -> Any:
        if self._iterator is None:
            self._begin_pass()
        while True:
            # Per sample: another rank reads other lanes in between.
            seed_everything(self._seed, _SAMPLE, self._shard, self._taken)
            with contextlib.suppress(StopIteration):
                assert self._iterator is not None
                sample = next(self._iterator)
                self._taken += 1
                self._nothing_yet = False
                return sample
            self._check_pass()
            self._pass += 1
            self._begin_pass()

    def _begin_pass(self, state: Any = None) -> None:
        seed_everything(self._seed, _PASS, self._shard, self._pass)
        self._iterable = self._factory(self._shard, self._shards)
        set_epoch(self._iterable, self._pass)
        if state is not None:
            self._iterable.load_state_dict(state)
        self._iterator = iter(self._iterable)
        self._nothing_yet = True

    def _check_pass(self) -> None:
        if self._nothing_yet:
            raise ConfigError(
                f"shard {self._shard} of {self._shards} of the stream has no samples",
                fix="make the factory return samples for every shard, or set batch.lanes to fewer lanes",
            )


class StreamReader:
    """Reads the lanes of this rank from their streams, on demand."""

    def __init__(
        self,
        stream: Stream,
        plan: BatchPlan,
        total_steps: int,
        seed: int,
        device: str,
        collate: Collate | None,
    ) -> None:
        self._stream, self._plan, self._total_steps = stream, plan, total_steps
        self._seed, self._device, self._collate = seed, device, collate
        self._sizes = split_evenly(plan.global_size, plan.lanes)

    def read(self, start: int) -> GroupLanes:
        """Yield every step from one on, as a group of its own."""
        shards = {}
        for lane in self._plan.mine:
            taken = start * self._sizes[lane]
            shards[lane] = self._stream.open(lane, self._plan.lanes, self._seed, taken)
        none = numpy.empty(0, dtype=numpy.int64)
        with contextlib.closing(self._stream):
            for step in range(start, self._total_steps):
                plan = self._plan.step(step)
                sizes = [self._sizes[lane] for lane in self._plan.mine]
                group = StepGroup([plan], sizes, none, (self._seed, plan.epoch), none)
                yield group, self._lanes(shards)

    def _lanes(self, shards: Mapping[int, _Shard]) -> Iterator[Batch]:
        for lane, shard in shards.items():
            samples = shard.take(self._sizes[lane])
            shard.seed_collate()
            yield copy_to_device(None, stack(samples, self._collate), self._device)


def _has_state(iterable: Any) -> bool:
    return hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
