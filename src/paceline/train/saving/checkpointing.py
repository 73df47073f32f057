"""How a run resumes from a checkpoint and saves new ones, and which changes of settings it refuses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from paceline.checkpoint.cadence import Cadence
from paceline.checkpoint.commit import CommitHooks, Saved, SaveFailed
from paceline.checkpoint.find import open_storage
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.read_ahead import ReadAhead
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.save import Saver
from paceline.checkpoint.storage import FINAL, Storage
from paceline.config.intervals import Every
from paceline.config.renamed import refuse_old_names
from paceline.config.values import flatten
from paceline.errors import ConfigError
from paceline.events import CheckpointBad, CheckpointFailed, CheckpointSaved, Event, FinalStateSaved
from paceline.exact.sharded_tensor import whole
from paceline.rundir import RunDir, write_whole
from paceline.runlock import Claim
from paceline.train.observers.console import say
from paceline.train.saving.imported_state import IMPORT_AGAIN, imported_step, is_imported
from paceline.train.saving.run_state import RunState
from paceline.world.collectives import all_gather_texts
from paceline.world.process_group import wait_for_all

_CLAIM_S = 1.0  # how often to check that no later start of this job has taken the run over
_BY_DEVICE = {"precision", "compile"}
"""What a recipe chooses for a GPU, so the same command has other values without one."""


class Checkpoints:
    """Restores and saves a run. Every rank has one and makes the same calls in the same order."""

    def __init__(
        self,
        state: RunState,
        emit: Callable[[Event], None],
        claim: Claim | None = None,
        on_saved: Callable[[float], None] = lambda _: None,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._ahead = ahead
        self._state, self._emit, self._on_saved = state, emit, on_saved
        self._world, self._config = state.world, state.config
        self._claim, self._claim_checked = claim, 0.0
        settings = state.config.checkpoint
        folder = RunDir.of(state.config).checkpoints
        self._storage = open_storage(folder, settings.to, state.config.name)
        self._saver = self._make_saver(
            self._storage, Retention(settings.keep, settings.best), self._report_progress
        )
        self._cadence = Cadence(
            Every.parse(settings.every),
            settings.mtbf_h * 3600.0,
            state.batches.plan.steps_per_epoch,
            time.monotonic(),
        )
        self._found: Manifest | None = None
        self._saved_step = -1
        self._prepared = False
        self.before_save: Callable[[int], None] = lambda _: None
        """Called on every rank before a checkpoint after so many steps is saved."""

    def _make_saver(
        self, storage: Storage, retention: Retention, after: Callable[[int], None] | None = None
    ) -> Saver:
        before_commit = self._claim.check if self._claim is not None else None
        token = all_gather_texts(self._world, secrets.token_hex(4))[0]
        return Saver(
            storage,
            self._world,
            token,
            retention=retention,
            hooks=CommitHooks(before_commit, after),
            silence_s=self._config.timeout.step_s,
            whole=whole,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._saver.give_up()  # a save in progress still gets its time

    def find(self) -> None:
        """Find the newest intact checkpoint; refuse one of other settings before the run is changed."""
        if self._world.is_main:
            self._storage.sweep()
            if self._config.resume == "never":
                self._start_over()
        self._found = newest_good(
            self._storage,
            self._world,
            lambda step, why: self._emit(CheckpointBad(step, why)),
            self._state.check,
            self._ahead,
        )
        if self._found is not None:
            self._refuse_changed_settings(self._found)
            self._refuse_other_data(self._found)

    def restore(self) -> int:
        """Resume from the checkpoint that was found; return its step, or 0 without one."""
        manifest, self._found = self._found, None
        if manifest is not None:
            self._load(manifest)
        if self._ahead is not None:
            self._ahead.clear()
        if manifest is None:
            return 0
        if self._world.is_main and is_imported(manifest):
            say(f"loaded the imported {self._storage.where(manifest.step)}")
        self._saved_step = manifest.step
        step = imported_step(manifest, self._state.batches.plan.steps_per_epoch)
        self._report_progress(step)
        return step

    def _start_over(self) -> None:
        """Set all checkpoints aside, once per launch or job: its restarts resume from their own."""
        directory, launch = RunDir.of(self._config), self._world.launch
        if self._world.is_restart and directory.was_begun_anew_by(launch):
            return
        for step in self._storage.steps():
            self._storage.set_aside(step)
        self.delete_final()
        write_whole(directory.started_over, launch.encode())

    def _refuse_changed_settings(self, manifest: Manifest) -> None:
        where = self._storage.where(manifest.step)
        refuse_old_names(manifest.config, where, fix="start a new run: give another name=")
        changed = self._state.changed_settings(manifest)
        if other := self._state.script.compare(manifest):
            changed.insert(0, other)
        if changed and self._config.resume != "changed":
            raise ConfigError(
                f"name={self._config.name} is a run with other settings: {shorten(changed)} "
                f"(in {where})",
                fix=f"{_as_begun(manifest, changed)}give this run another name=, resume anyway with resume=changed, or start over with resume=never",
            )

        self._refuse_changed_text(manifest)

    def _refuse_changed_text(self, manifest: Manifest) -> None:
        """Raise for a complete run whose script has changed: without a step, the change would have no effect."""
        change = self._state.script.change
        is_over = bool(manifest.values.get("finished"))
        is_over = is_over or manifest.step >= self._state.batches.total_steps
        # A restart did not choose the text: it is the last one of a run whose script was edited meanwhile.
        if change and is_over and self._config.resume != "changed" and not self._world.is_restart:
            raise ConfigError(
                f"name={self._config.name} is complete, and its script has {change}",
                fix="start anew with another name= or with resume=never, train longer with epochs=, or keep the result with resume=changed",
            )

    def _refuse_other_data(self, manifest: Manifest) -> None:
        found, fix = self._state.compare_data(manifest)
        is_compared = self._config.record.steps > 0  # by `paceline verify`, which names the cause
        if found and self._config.resume != "changed" and not is_compared:
            raise ConfigError(
                f"name={self._config.name} is a run with another dataset: now {found} "
                f"({self._storage.where(manifest.step)})",
                fix=f"{fix}. Or give this run another name=, resume anyway with resume=changed, or start over with resume=never",
            )

    def _load(self, manifest: Manifest) -> None:
        saved, wanted = _replicas(manifest.config), _replicas(dict(flatten(self._config)))
        where = self._storage.where(manifest.step)
        tensors = read_tensors(self._storage, manifest, self._ahead)
        if saved != wanted:
            raise ConfigError(
                f"{where} was saved with {saved} local SGD replicas, this run has {wanted}",
                fix="set local_sgd.steps and local_sgd.replicas as before, or give this run another name=",
            )
        problems = self._state.load(manifest, tensors)
        if problems:
            as_before = "build model and optimizer as before, or give this run another name="
            raise ConfigError(
                f"{where} does not fit this model: {shorten(problems)}",
                fix=IMPORT_AGAIN if is_imported(manifest) else as_before,
            )

    def is_due(self) -> bool:
        """Return whether this rank asks for a save now. Raises if the run was taken over."""
        now = time.monotonic()
        if self._claim is not None and now > self._claim_checked + _CLAIM_S:
            self._claim_checked = now
            self._claim.check()
        return self._world.is_main and self._cadence.due_at(now) and not self.is_saving

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._saver.busy

    def update(self) -> None:
        """Report the saves that have finished; reserve host memory at the first call."""
        self._report_saves()
        if not self._prepared:
            self._prepared = True
            self._saver.prepare(self._state.tensors(), self._state.own_tensors())

    def after_step(self, step: int, metrics: Mapping[str, float], *, requested: bool) -> None:
        """Save if any rank requested it, or if `checkpoint.every` says so."""
        if requested or self._cadence.due_after(step):
            self.save(step, metrics)

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the run after this step, unless that is done already."""
        if step == self._saved_step:
            return
        self._saved_step = step
        self.before_save(step)
        self._cadence.begun(time.monotonic())
        manifest = self._state.manifest(step, metrics)
        self._saver.save(self._state.tensors(), manifest, self._state.own_tensors())

    def delete_final(self) -> None:
        """Delete what an earlier end of this run has saved of a model that was changed after the loop."""
        if self._world.is_main:
            final = self._storage.within(FINAL)
            final.sweep()
            for step in final.steps():
                final.delete(step)

    def save_final(self, step: int, weights: dict[str, Tensor], changed: str) -> None:
        """Save weights that were changed after the loop, apart from the checkpoints. Every rank must call this."""
        manifest = self._state.final_manifest(step)
        saver = self._make_saver(self._storage.within(FINAL), Retention(keep=1))
        saver.save(weights, manifest)
        saver.close()
        for saved in saver.finished():
            self._emit(FinalStateSaved(step, saved.where, saved.manifest.size_bytes, changed))
        wait_for_all(self._world)

    def finish(self, *, in_time: bool = False) -> None:
        """Wait until the last save is complete on every rank; with `in_time`, not for old ones to be deleted."""
        try:
            if in_time:
                self._saver.wait()
            else:
                self._saver.close()
        finally:
            self._report_saves()
        # Rank 0 may serve the store through which the others learn that the save is complete.
        wait_for_all(self._world)

    def _report_saves(self) -> None:
        try:
            while finished := self._saver.finished():
                for saved in finished:
                    self._report(saved)
        except SaveFailed as error:
            self._emit(CheckpointFailed(error.step, error.problem))
            raise

    def _report(self, saved: Saved) -> None:
        self._cadence.learn(saved.held_s, saved.total_s)
        self._on_saved(saved.total_s)
        step, size_bytes = saved.manifest.step, saved.manifest.size_bytes
        self._emit(CheckpointSaved(step, saved.where, size_bytes, saved.held_s, saved.total_s))

    def _report_progress(self, step: int) -> None:
        """Write the step for the launcher, which counts only failures without progress."""
        if self._world.is_main and self._world.progress_file is not None:
            write_whole(self._world.progress_file, str(step).encode())


def _replicas(config: Mapping[str, Any]) -> int:
    """Return the number of local SGD replicas; 0 without local SGD."""
    return int(config.get("local_sgd.replicas", 0)) if int(config.get("local_sgd.steps", 0)) else 0


def shorten(items: list[str], limit: int = 8) -> str:
    """Return the first items as one line.

    >>> shorten(["a", "b", "c"], limit=2)
    'a; b; and 1 more'
    """
    shown = items[:limit]
    if len(items) > limit:
        shown = [*shown, f"and {len(items) - limit} more"]
    return "; ".join(shown)


def _as_begun(manifest: Manifest, changed: Sequence[str]) -> str:
    """Return what to type to resume as the run began, if only what suits a device differs; else nothing."""
    names = [text.partition(" ")[0] for text in changed]
    if set(names) - _BY_DEVICE:
        return ""
    words = [f"{name}={str(manifest.config[name]).lower()}" for name in names]
    return f"resume as it began with {' '.join(words)}, "
