"""How a checkpoint is saved behind the training's back: a copy to host memory now, the writing in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.image import split_by_size
from paceline.checkpoint.manifest import FileFacts, Manifest
from paceline.checkpoint.retention import no_longer_needed
from paceline.checkpoint.staging import WORDS, Staging
from paceline.checkpoint.storage import Storage, read_manifest, verify
from paceline.errors import BadCheckpoint, EnvironmentUnfit, PacelineError
from paceline.tensorfile import Spec
from paceline.world.mailbox import Mailbox
from paceline.world.world import World

_LOOK_S = 0.01
_LAST_WORDS_S = 3.0  # how long to wait for other ranks' files when this one has failed already
_COMMITTED, _RETIRED = "committed", "retired"
_SLOWEST_BYTES_PER_S = 2e6  # what any storage must reach in all, before a save is given up
_SHOWN_S = 30.0  # how late a file of another rank may be seen
_SLOW = "see whether a rank or the storage hangs; run again: the checkpoint before it is good"


@dataclass(frozen=True)
class Saved:
    """A save that is complete."""

    manifest: Manifest
    where: str
    held_s: float
    """How long the training was held."""
    total_s: float


@dataclass(frozen=True)
class _SaveTask:
    number: int
    """Which save of this process it is: the same on all ranks, whose letters bear it."""
    draft: Manifest
    name: str
    image: memoryview | None
    begun: float
    held_s: float
    patience_s: float
    """How long any rank may take for its part."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set once the memory that holds the image may be used again."""


class SaveFailed(EnvironmentUnfit):
    """A checkpoint could not be saved, or read back."""

    comes_again = False

    def __init__(self, step: int, cause: Exception) -> None:
        start = f"cannot save step {step}: "
        said = (
            cause.problem
            if isinstance(cause, PacelineError)
            else f"{type(cause).__name__}: {cause}"
        )
        fix = (
            cause.fix if isinstance(cause, PacelineError) else "look at the storage, and run again"
        )
        super().__init__(start + said.removeprefix(start), fix=fix)
        self.step = step


class _TooLate(EnvironmentUnfit):
    """A letter did not come in time."""


class Saver:
    """Saves checkpoints, at most one at a time. Every rank has one, writes its share, and makes the same calls."""

    def __init__(
        self,
        storage: Storage,
        world: World,
        token: str,
        *,
        keep: int = 3,
        best: str = "",
        silence_s: float = 60.0,
        before_commit: Callable[[], None] | None = None,
        on_commit: Callable[[int], None] | None = None,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take what makes a whole tensor of one in slices, if any is: every rank will call it for every tensor, by name."""
        self._storage, self._world, self._token = storage, world, token
        self._keep, self._best, self._silence_s = keep, best, silence_s
        self._before_commit, self._on_commit = before_commit or _nothing, on_commit
        self._whole = whole or _as_it_is
        self._mailbox = Mailbox(world, f"save-{token}")
        self._staging = Staging()
        self._threads: list[threading.Thread] = []
        self._retiring = threading.Lock()
        self._saves = 0
        self._last: _SaveTask | None = None
        self._awaited: _SaveTask | None = None
        self._finished: SimpleQueue[Saved | SaveFailed] = SimpleQueue()
        self._limit = float("inf")

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as far as this rank knows."""
        return any(thread.is_alive() for thread in self._threads)

    def prepare(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> None:
        """Get the memory for the first save ready, from a thread: touching it first costs more than the copy."""
        self._start(self._staging.prepare, self._share(_specs(tensors)) | _specs(own or {}))

    def save(
        self,
        tensors: Mapping[str, Tensor],
        draft: Manifest,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy this rank's share of the tensors, and `own`, which it alone has, and write all that from a thread.

        A save under way is waited for first.
        """
        begun = time.perf_counter()
        self.wait()
        if self._last is not None and not self._last.written.is_set():
            raise SaveFailed(
                draft.step, EnvironmentUnfit("the save before it is still being written", fix=_SLOW)
            )
        specs, mine = _specs(tensors), _specs(own or {})
        wholes = ((spec, self._whole(value)) for spec, value in specs.items())
        image = self._staging.fill(self._share(specs) | mine, chain(wholes, mine.items()))
        name = f"part-{self._world.rank + 1:05d}-of-{self._world.size:05d}.safetensors"
        self._saves += 1
        size_bytes = sum(value.nbytes for value in (*tensors.values(), *mine.values()))
        patience_s = (
            self._silence_s + size_bytes * (self._world.size if mine else 1) / _SLOWEST_BYTES_PER_S
        )
        self._last = self._awaited = _SaveTask(
            self._saves, draft, name, image, begun, time.perf_counter() - begun, patience_s
        )
        self._start(self._run, self._awaited)

    def _start(self, work: Callable[[Any], None], argument: object) -> None:
        """Work in a thread that the process waits for before it ends."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, args=(argument,), name="paceline-save"))
        self._threads[-1].start()

    def finished(self) -> list[Saved]:
        """Return the saves that were completed since the last look (on rank 0), or raise why one could not be."""
        found: list[Saved] = []
        while True:
            try:
                outcome = self._finished.get_nowait()
            except Empty:
                return found
            if isinstance(outcome, Saved):
                found.append(outcome)
            elif found:
                self._finished.put(outcome)
                return found
            else:
                raise outcome

    def wait(self) -> None:
        """Wait until the save under way is complete on all ranks, or has failed; `finished` tells.

        Old checkpoints may still be on their way out.
        """
        if self._awaited is None:
            return
        job, self._awaited = self._awaited, None
        try:
            self._hear(f"{job.number}/{_COMMITTED}", job.patience_s)
        except _TooLate as error:
            self.give_up()
            self._finished.put(SaveFailed(job.draft.step, error))
        except PacelineError as error:
            if not self._world.is_main:  # rank 0 has put it there itself
                self._finished.put(SaveFailed(job.draft.step, error))

    def close(self) -> None:
        """Wait until nothing is left to do, on any rank."""
        self.wait()
        if self._last is not None and not self._world.is_main:
            with contextlib.suppress(
                PacelineError
            ):  # the checkpoint is there, whatever becomes of the old ones
                self._hear(f"{self._last.number}/{_RETIRED}", self._last.patience_s)
        for thread in self._threads:
            thread.join()

    def give_up(self) -> None:
        """Let a save under way end soon, whatever other ranks do: this one has failed."""
        self._limit = time.monotonic() + _LAST_WORDS_S

    def _share(self, specs: Mapping[Spec, Tensor]) -> dict[Spec, Tensor]:
        names = list(specs)
        mine = split_by_size([spec.size_bytes for spec in names], self._world.size)[
            self._world.rank
        ]
        return {names[number]: specs[names[number]] for number in mine}

    def _run(self, job: _SaveTask) -> None:
        """Write this rank's file; rank 0 then makes the checkpoint exist. Nothing that goes wrong here is lost."""
        try:
            self._write(job)
            if self._world.is_main:
                self._commit(job)
        except Exception as error:  # noqa: BLE001 - raised again by the training, which looks at it after every step
            failure = SaveFailed(job.draft.step, error)
            if self._world.is_main:
                self._finished.put(failure)
            letter = json.dumps({"problem": failure.problem, "fix": failure.fix})
            self._tell(
                f"{job.number}/{_COMMITTED if self._world.is_main else self._world.rank}", letter
            )
        finally:
            job.written.set()
            if self._world.is_main:
                self._tell(f"{job.number}/{_RETIRED}", "{}")

    def _tell(self, key: str, letter: str) -> None:
        """Post a last word; with the ranks gone, there is nobody to hear it."""
        with contextlib.suppress(RuntimeError):
            self._mailbox.post(key, letter)

    def _write(self, job: _SaveTask) -> None:
        letter = {}
        if job.image is not None:
            name, facts = self._storage.write(job.draft.step, self._token, job.name, job.image)
            letter = {"name": name} | vars(facts)
        job.written.set()
        self._mailbox.post(f"{job.number}/{self._world.rank}", json.dumps(letter))

    def _commit(self, job: _SaveTask) -> None:
        step, files = job.draft.step, {}
        for rank in range(self._world.size):
            if letter := self._hear(f"{job.number}/{rank}", job.patience_s):
                files[letter["name"]] = FileFacts(letter["size_bytes"], letter["xxh3"])
        manifest = replace(job.draft, files=files)
        self._see_all(step, files)
        self._before_commit()
        if self._storage.commit(step, self._token, manifest):
            if self._on_commit is not None:
                self._on_commit(step)
            self._finished.put(
                Saved(
                    manifest, self._storage.where(step), job.held_s, time.perf_counter() - job.begun
                )
            )
        self._mailbox.post(f"{job.number}/{_COMMITTED}", "{}")
        self._retire(step)

    def _see_all(self, step: int, files: Mapping[str, FileFacts]) -> None:
        """Make sure that the files of all ranks are where the manifest will be; a shared file system may show them late."""
        limit = time.monotonic() + _SHOWN_S
        for name, facts in files.items():
            while self._storage.written_size(step, self._token, name) != facts.size_bytes:
                if time.monotonic() > limit:
                    raise EnvironmentUnfit(
                        f"rank 0 does not see {name} in {self._storage.address}, though another rank has written it",
                        fix="put runs= or checkpoint.to= where all ranks see the same files",
                    )
                time.sleep(_LOOK_S)

    def _hear(self, key: str, patience_s: float) -> dict[str, Any]:
        """Wait for a letter of another rank's writer; raise what it could not do."""
        begun = time.monotonic()
        while (letter := self._mailbox.look(key)) is None:
            if time.monotonic() > min(begun + patience_s, self._limit):
                raise _TooLate("another rank did not write its part in time", fix=_SLOW)
            time.sleep(_LOOK_S)
        said: dict[str, Any] = json.loads(letter)
        if "problem" in said:
            raise EnvironmentUnfit(said["problem"], fix=said["fix"])
        return said

    def _retire(self, newest: int) -> None:
        """Delete what is no longer needed, once the newest has been read back from the disk."""
        with self._retiring:
            metrics = {}
            for step in self._storage.steps():
                with contextlib.suppress(
                    BadCheckpoint
                ):  # what cannot be judged is not ours to delete
                    metrics[step] = read_manifest(self._storage, step).metrics
            doomed = [
                step for step in no_longer_needed(metrics, self._keep, self._best) if step < newest
            ]
            if doomed:
                verify(self._storage, newest, cached=False)
                self._before_commit()
            for step in doomed:
                self._storage.delete(step)


def _nothing() -> None:
    """Hold nothing against a commit."""


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _specs(tensors: Mapping[str, Tensor]) -> dict[Spec, Tensor]:
    return {_spec(name, value): value for name, value in sorted(tensors.items())}


def _spec(name: str, value: Tensor) -> Spec:
    if value.dtype not in WORDS or value.layout != torch.strided:
        raise EnvironmentUnfit(
            f"{name} is of type {value.dtype}, {value.layout}, which a safetensors file cannot hold",
            fix="keep it out of the model's and the optimizer's state, or convert it",
        )
    return Spec(name, WORDS[value.dtype], tuple(value.shape))
