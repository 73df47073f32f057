"""Asynchronous saves: copy tensors to host memory while the training waits, write them from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from queue import Empty
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.commit import (
    TOO_SLOW,
    CheckpointWriter,
    CommitHooks,
    Saved,
    SaveFailed,
    SaveTask,
)
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.staging import DTYPE_NAMES, Staging, split_by_size
from paceline.checkpoint.storage import Storage
from paceline.errors import EnvironmentUnfit
from paceline.tensorfile import Spec
from paceline.world.world import World

_SLOWEST_BYTES_PER_S = 2e6  # a storage below this total rate counts as hanging

_KEEP_THREE = Retention(keep=3)
_NO_HOOKS = CommitHooks()


def _unchanged(value: Tensor) -> Tensor:
    return value


class Saver:
    """Saves checkpoints, one at a time.

    Every rank has one, writes its share, and makes the same calls.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        token: str,
        *,
        retention: Retention = _KEEP_THREE,
        hooks: CommitHooks = _NO_HOOKS,
        silence_s: float = 60.0,
        whole: Callable[[Tensor], Tensor] = _unchanged,
    ) -> None:
        """Create a saver.

        `whole` gathers a sharded tensor, and all ranks call it for all tensors in one order.
        """
        self._writer = CheckpointWriter(storage, world, token, retention, hooks)
        self._world, self._silence_s, self._whole = world, silence_s, whole
        self._staging = Staging()
        self._threads: list[threading.Thread] = []
        self._saves = 0
        self._last: SaveTask | None = None
        self._awaited: SaveTask | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return any(thread.is_alive() for thread in self._threads)

    def prepare(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> None:
        """Allocate the staging memory from a thread: its first page faults cost more than the copy."""
        self._start(self._staging.prepare, self._share(_specs(tensors)) | _specs(own or {}))

    def save(
        self,
        tensors: Mapping[str, Tensor],
        draft: Manifest,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy this rank's share of the tensors, and `own`, which only this rank has; write from a thread.

        Waits for the previous save first.
        """
        begun = time.perf_counter()
        self.wait()
        if self._last is not None and not self._last.written.is_set():
            busy = EnvironmentUnfit("the save before it is still being written", fix=TOO_SLOW)
            raise SaveFailed(draft.step, busy)
        specs, own_specs = _specs(tensors), _specs(own or {})
        gathered = ((spec, self._whole(value)) for spec, value in specs.items())
        share = self._share(specs) | own_specs
        image = self._staging.fill(share, chain(gathered, own_specs.items()))
        size_bytes = sum(value.nbytes for value in (*tensors.values(), *own_specs.values()))
        writers = self._world.size if own_specs else 1
        self._saves += 1
        task = SaveTask(
            number=self._saves,
            draft=draft,
            name=f"part-{self._world.rank + 1:05d}-of-{self._world.size:05d}.safetensors",
            image=image,
            begun=begun,
            held_s=time.perf_counter() - begun,
            patience_s=self._silence_s + size_bytes * writers / _SLOWEST_BYTES_PER_S,
        )
        self._last = self._awaited = task
        self._start(self._writer.run, task)

    def _start(self, work: Callable[[Any], None], argument: object) -> None:
        """Run in a non-daemon thread, which the process joins before it exits."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, args=(argument,), name="paceline-save"))
        self._threads[-1].start()

    def finished(self) -> list[Saved]:
        """Return the saves completed since the last call (on rank 0), or raise the failure of one."""
        completed: list[Saved] = []
        while True:
            try:
                outcome = self._writer.outcomes.get_nowait()
            except Empty:
                return completed
            if isinstance(outcome, Saved):
                completed.append(outcome)
            elif completed:
                self._writer.outcomes.put(outcome)
                return completed
            else:
                raise outcome

    def wait(self) -> None:
        """Wait until the current save is complete on all ranks or has failed; `finished` says which.

        Expired checkpoints may still be deleted afterwards.
        """
        if self._awaited is not None:
            task, self._awaited = self._awaited, None
            self._writer.wait_for_commit(task)

    def close(self) -> None:
        """Wait until no rank has anything left to write or delete."""
        self.wait()
        if self._last is not None:
            self._writer.wait_for_retirement(self._last)
        for thread in self._threads:
            thread.join()

    def give_up(self) -> None:
        """Let a current save end soon without the other ranks, because this rank has failed."""
        self._writer.give_up()

    def _share(self, specs: Mapping[Spec, Tensor]) -> dict[Spec, Tensor]:
        names = list(specs)
        shares = split_by_size([spec.size_bytes for spec in names], self._world.size)
        return {names[number]: specs[names[number]] for number in shares[self._world.rank]}


def _specs(tensors: Mapping[str, Tensor]) -> dict[Spec, Tensor]:
    return {_spec(name, value): value for name, value in sorted(tensors.items())}


def _spec(name: str, value: Tensor) -> Spec:
    if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
        raise EnvironmentUnfit(
            f"{name} has dtype {value.dtype} and layout {value.layout}, which safetensors cannot store",
            fix="keep it out of the state of the model and the optimizer, or convert it",
        )
    return Spec(name, DTYPE_NAMES[value.dtype], tuple(value.shape))
