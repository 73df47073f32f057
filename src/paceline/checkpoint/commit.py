"""The background part of a save: write this rank's file, commit on rank 0, delete expired checkpoints."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from paceline.checkpoint.manifest import FileFacts, Manifest
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.storage import Storage, read_manifest, verify
from paceline.errors import BadCheckpoint, EnvironmentUnfit, PacelineError
from paceline.world.mailbox import Mailbox
from paceline.world.world import World

_POLL_S = 0.01
_GRACE_S = 3.0  # how long to wait for the files of other ranks after this rank has failed
_COMMITTED, _RETIRED = "committed", "retired"
_VISIBLE_S = 30.0  # how long a shared file system may hide the file of another rank
TOO_SLOW = (
    "check whether a rank or the storage hangs, then run again: the previous checkpoint is intact"
)


@dataclass(frozen=True)
class Saved:
    """A save that is complete."""

    manifest: Manifest
    where: str
    held_s: float
    """Seconds for which the training was blocked."""
    total_s: float


class SaveFailed(EnvironmentUnfit):
    """A checkpoint could not be saved, or not be read back."""

    comes_again = False

    def __init__(self, step: int, cause: Exception) -> None:
        problem = f"{type(cause).__name__}: {cause}"
        fix = "check the storage, then run again"
        if isinstance(cause, PacelineError):
            problem, fix = cause.problem, cause.fix
        start = f"cannot save step {step}: "
        super().__init__(start + problem.removeprefix(start), fix=fix)
        self.step = step


class DeadlineMissed(EnvironmentUnfit):
    """Another rank did not report in time."""


@dataclass(frozen=True)
class SaveTask:
    """One rank's part of one save."""

    number: int
    """Counts the saves of this process; equal on all ranks, whose messages carry it."""
    draft: Manifest
    name: str
    image: memoryview | None
    begun: float
    held_s: float
    patience_s: float
    """Seconds that any rank may take for its part."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set once the staging memory may be overwritten."""


@dataclass(frozen=True)
class CommitHooks:
    """Functions that rank 0 calls around a commit."""

    before: Callable[[], None] | None = None
    """Raises if this process may no longer write."""
    after: Callable[[int], None] | None = None
    """Receives the step of a new checkpoint."""


class CheckpointWriter:
    """Writes one rank's files; the ranks report to rank 0 through a mailbox."""

    def __init__(
        self, storage: Storage, world: World, token: str, retention: Retention, hooks: CommitHooks
    ) -> None:
        self.outcomes: SimpleQueue[Saved | SaveFailed] = SimpleQueue()
        self._storage, self._world, self._token = storage, world, token
        self._retention, self._hooks = retention, hooks
        self._mailbox = Mailbox(world, f"save-{token}")
        self._retiring = threading.Lock()
        self._deadline = float("inf")

    def run(self, task: SaveTask) -> None:
        """Write this rank's file, and commit the checkpoint on rank 0.

        Failures are queued as outcomes, never lost.
        """
        try:
            self._write(task)
            if self._world.is_main:
                self._commit(task)
        except Exception as error:  # noqa: BLE001 - the training raises it after its step
            failure = SaveFailed(task.draft.step, error)
            if self._world.is_main:
                self.outcomes.put(failure)
            sender = _COMMITTED if self._world.is_main else self._world.rank
            message = json.dumps({"problem": failure.problem, "fix": failure.fix})
            self._post_if_connected(f"{task.number}/{sender}", message)
        finally:
            task.written.set()
            if self._world.is_main:
                self._post_if_connected(f"{task.number}/{_RETIRED}", "{}")

    def wait_for_commit(self, task: SaveTask) -> None:
        """Wait until rank 0 has committed; a failure of another rank becomes an outcome here."""
        try:
            self._receive(f"{task.number}/{_COMMITTED}", task.patience_s)
        except DeadlineMissed as error:
            self.give_up()
            self.outcomes.put(SaveFailed(task.draft.step, error))
        except PacelineError as error:
            if not self._world.is_main:  # rank 0 has queued it itself
                self.outcomes.put(SaveFailed(task.draft.step, error))

    def wait_for_retirement(self, task: SaveTask) -> None:
        """Wait until rank 0 has deleted the expired checkpoints; ignore its failures."""
        if not self._world.is_main:
            with contextlib.suppress(PacelineError):  # the new checkpoint is committed already
                self._receive(f"{task.number}/{_RETIRED}", task.patience_s)

    def give_up(self) -> None:
        """Wait at most a few more seconds for other ranks."""
        self._deadline = time.monotonic() + _GRACE_S

    def _post_if_connected(self, key: str, message: str) -> None:
        with contextlib.suppress(RuntimeError):  # the other ranks are gone
            self._mailbox.post(key, message)

    def _write(self, task: SaveTask) -> None:
        message = {}
        if task.image is not None:
            name, facts = self._storage.write(task.draft.step, self._token, task.name, task.image)
            message = {"name": name} | vars(facts)
        task.written.set()
        self._mailbox.post(f"{task.number}/{self._world.rank}", json.dumps(message))

    def _commit(self, task: SaveTask) -> None:
        step, files = task.draft.step, {}
        for rank in range(self._world.size):
            if message := self._receive(f"{task.number}/{rank}", task.patience_s):
                files[message["name"]] = FileFacts(message["size_bytes"], message["xxh3"])
        manifest = replace(task.draft, files=files)
        self._wait_until_visible(step, files)
        self._check_permission()
        if self._storage.commit(step, self._token, manifest):
            if self._hooks.after is not None:
                self._hooks.after(step)
            total_s = time.perf_counter() - task.begun
            self.outcomes.put(Saved(manifest, self._storage.where(step), task.held_s, total_s))
        self._mailbox.post(f"{task.number}/{_COMMITTED}", "{}")
        self._retire(step)

    def _check_permission(self) -> None:
        if self._hooks.before is not None:
            self._hooks.before()

    def _wait_until_visible(self, step: int, files: Mapping[str, FileFacts]) -> None:
        deadline = time.monotonic() + _VISIBLE_S
        for name, facts in files.items():
            while self._storage.written_size(step, self._token, name) != facts.size_bytes:
                if time.monotonic() > deadline:
                    raise EnvironmentUnfit(
                        f"rank 0 does not see {name} in {self._storage.address}, though another rank wrote it",
                        fix="set runs= or checkpoint.to= to storage that all ranks share",
                    )
                time.sleep(_POLL_S)

    def _receive(self, key: str, patience_s: float) -> dict[str, Any]:
        """Wait for the message of another rank; raise the failure that it reports."""
        begun = time.monotonic()
        while (text := self._mailbox.look(key)) is None:
            if time.monotonic() > min(begun + patience_s, self._deadline):
                raise DeadlineMissed("another rank did not write its part in time", fix=TOO_SLOW)
            time.sleep(_POLL_S)
        message: dict[str, Any] = json.loads(text)
        if "problem" in message:
            raise EnvironmentUnfit(message["problem"], fix=message["fix"])
        return message

    def _retire(self, newest: int) -> None:
        """Delete expired checkpoints, after the newest was read back from disk and verified."""
        with self._retiring:
            metrics = {}
            for step in self._storage.steps():
                with contextlib.suppress(BadCheckpoint):  # never delete what cannot be judged
                    metrics[step] = read_manifest(self._storage, step).metrics
            expired = [step for step in self._retention.expired(metrics) if step < newest]
            if expired:
                verify(self._storage, newest, cached=False)
                self._check_permission()
            for step in expired:
                self._storage.delete(step)
