"""How a checkpoint is saved behind the training's back: a copy to host memory now, the writing in a thread."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.image import Image, Spec, plan_image, split_by_size
from paceline.checkpoint.manifest import FileFacts, Manifest
from paceline.checkpoint.retention import no_longer_needed
from paceline.checkpoint.storage import Storage, check, manifest_of
from paceline.errors import BadCheckpoint, EnvironmentUnfit, PacelineError
from paceline.world.facts import World
from paceline.world.mailbox import Mailbox

_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {word: dtype for dtype, word in _WORDS.items()}

_LOOK_S = 0.02
_LAST_WORDS_S = 3.0  # how long to wait for other ranks' files when this one has failed already
_COMMITTED = "committed"


@dataclass(frozen=True)
class Saved:
    """A save that is complete."""

    manifest: Manifest
    where: str
    held_s: float
    """How long the training was held."""
    total_s: float


@dataclass(frozen=True)
class _Job:
    draft: Manifest
    name: str
    image: memoryview | None
    begun: float
    held_s: float


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
        patience_s: float = 1800.0,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        self._storage, self._world, self._token = storage, world, token
        self._keep, self._best, self._patience_s = keep, best, patience_s
        self._on_commit = on_commit
        self._mailbox = Mailbox(world, f"save-{token}")
        self._staging = _Staging()
        self._thread: threading.Thread | None = None
        self._step = -1
        self._finished: SimpleQueue[Saved | PacelineError] = SimpleQueue()
        self._limit = float("inf")

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as far as this rank knows."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, tensors: Mapping[str, Tensor], draft: Manifest) -> None:
        """Copy this rank's share of the tensors and write it from a thread. A save under way is waited for first."""
        begun = time.perf_counter()
        self.wait()
        mine = self._share(tensors)
        image = self._staging.fill(mine) if mine else None
        name = f"part-{self._world.rank + 1:05d}-of-{self._world.size:05d}.safetensors"
        job = _Job(draft, name, image, begun, time.perf_counter() - begun)
        self._step = draft.step
        self._thread = threading.Thread(target=self._run, args=(job,), name="paceline-save")
        self._thread.start()

    def finished(self) -> list[Saved]:
        """Return the saves that were completed since the last look (on rank 0), or raise why one could not be."""
        found: list[Saved] = []
        while True:
            try:
                outcome = self._finished.get_nowait()
            except Empty:
                return found
            if isinstance(outcome, PacelineError):
                raise outcome
            found.append(outcome)

    def wait(self) -> None:
        """Wait until the save under way is complete on all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if not self._world.is_main:
            self._hear(f"{self._step}/{_COMMITTED}", time.monotonic() + self._patience_s)

    def give_up(self) -> None:
        """Let a save under way end soon, whatever other ranks do: this one has failed."""
        self._limit = time.monotonic() + _LAST_WORDS_S

    def _share(self, tensors: Mapping[str, Tensor]) -> dict[Spec, Tensor]:
        specs = {Spec(name, _WORDS[value.dtype], tuple(value.shape)): value for name, value in sorted(tensors.items())}
        names = list(specs)
        mine = split_by_size([spec.size_bytes for spec in names], self._world.size)[self._world.rank]
        return {names[number]: specs[names[number]] for number in mine}

    def _run(self, job: _Job) -> None:
        """Write this rank's file; rank 0 then makes the checkpoint exist. Nothing that goes wrong here is lost."""
        try:
            self._write(job)
            if self._world.is_main:
                self._commit(job)
        except Exception as error:  # noqa: BLE001 - raised again by the training, which looks at it after every step
            failure = (
                error
                if isinstance(error, PacelineError)
                else EnvironmentUnfit(
                    f"cannot save step {job.draft.step}: {type(error).__name__}: {error}",
                    fix="look at the storage, and run again",
                )
            )
            letter = json.dumps({"problem": failure.problem, "fix": failure.fix})
            self._mailbox.post(f"{job.draft.step}/{_COMMITTED if self._world.is_main else self._world.rank}", letter)
            self._finished.put(failure)

    def _write(self, job: _Job) -> None:
        letter = {}
        if job.image is not None:
            name, facts = self._storage.write(job.draft.step, self._token, job.name, job.image)
            letter = {"name": name} | vars(facts)
        self._mailbox.post(f"{job.draft.step}/{self._world.rank}", json.dumps(letter))

    def _commit(self, job: _Job) -> None:
        step, files = job.draft.step, {}
        for rank in range(self._world.size):
            if letter := self._hear(f"{step}/{rank}"):
                files[letter["name"]] = FileFacts(letter["size_bytes"], letter["xxh3"])
        manifest = replace(job.draft, files=files)
        if self._storage.commit(step, self._token, manifest):
            if self._on_commit is not None:
                self._on_commit(step)
            self._finished.put(Saved(manifest, self._storage.where(step), job.held_s, time.perf_counter() - job.begun))
        self._mailbox.post(f"{step}/{_COMMITTED}", "{}")
        self._retire(step)

    def _hear(self, key: str, limit: float = float("inf")) -> dict[str, Any]:
        """Wait for a letter of another rank's writer; raise what it could not do."""
        while (letter := self._mailbox.look(key)) is None:
            if time.monotonic() > min(limit, self._limit):
                raise EnvironmentUnfit(
                    "a save was given up: another rank never wrote its part",
                    fix="run again: the checkpoint before it is good",
                )
            time.sleep(_LOOK_S)
        said: dict[str, Any] = json.loads(letter)
        if "problem" in said:
            raise EnvironmentUnfit(said["problem"], fix=said["fix"])
        return said

    def _retire(self, newest: int) -> None:
        """Delete what is no longer needed, once the newest has been read back."""
        metrics = {}
        for step in self._storage.steps():
            with contextlib.suppress(BadCheckpoint):  # what cannot be judged is not ours to delete
                metrics[step] = manifest_of(self._storage, step).metrics
        doomed = [step for step in no_longer_needed(metrics, self._keep, self._best) if step < newest]
        if doomed:
            check(self._storage, newest)
        for step in doomed:
            self._storage.delete(step)


class _Staging:
    """Host memory that holds a file until it is written: aligned, pinned for a GPU, and kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, mine: Mapping[Spec, Tensor]) -> memoryview:
        """Copy tensors to where they will lie in the file, and return the file."""
        image: Image = plan_image(mine)
        on_gpu = any(value.is_cuda for value in mine.values())
        if len(self._memory) < image.size_bytes:
            self._memory = _page_aligned(image.size_bytes, pinned=on_gpu)
        memory = self._memory[: image.size_bytes]
        memory[: len(image.header)] = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
        for place in image.places:
            if place.end > place.begin:
                flat = mine[place.spec].detach().contiguous().reshape(-1).view(torch.uint8)
                memory[place.begin : place.end].copy_(flat, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return memoryview(memory.numpy())  # type: ignore[arg-type]


def _page_aligned(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # else the first copy spends its time on page faults
    return torch.frombuffer(memory, dtype=torch.uint8)
