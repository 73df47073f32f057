"""How a run outlives its processes: what it goes on from, when it saves, when it stops."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline import handover
from paceline.checkpoint.cadence import Cadence
from paceline.checkpoint.commit import CommitHooks, Saved, SaveFailed
from paceline.checkpoint.find import open_storage
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.restore import newest_good, read_tensors
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.save import Saver
from paceline.config import RunConfig
from paceline.config.intervals import Every, seconds_from
from paceline.config.values import flatten
from paceline.data.reading.batches import Batches
from paceline.errors import ConfigError
from paceline.events import CheckpointBad, CheckpointFailed, CheckpointSaved, Event
from paceline.rundir import RunDir, write_whole
from paceline.runlock import Claim
from paceline.train.lane_sum import Note, RankRequests
from paceline.train.meter import Meter
from paceline.train.optimizer_step import OptimizerStep
from paceline.train.sharded_tensor import whole
from paceline.train.state import named_state, optimizer_facts
from paceline.train.stopping import AGREE_APART_S, AGREE_S, Agreement, StopRequest
from paceline.version import VERSION
from paceline.world.collectives import all_gather_texts
from paceline.world.process_group import wait_for_all
from paceline.world.world import World

# Settings that do not make it another training.
_FREE = {
    "name", "runs", "resume", "stop_after", "evaluate_steps", "epochs", "steps", "parallel", "shard_over", "device", "backend",
    "capture", "read.resident_gb", "read.prefetch_steps", "read.workers", "read.cache", "read.cache_gb",
}  # fmt: skip
_CLAIM_S = 1.0
_FREE_TABLES = {"checkpoint", "log", "timeout", "record", "profile"}


class Lifeline:
    """Restores, saves and stops a run. Every rank has one and makes the same calls in the same order."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        config: RunConfig,
        take: OptimizerStep,
        meters: Mapping[str, Meter],
        emit: Callable[[Event], None],
        claim: Claim | None = None,
    ) -> None:
        self._world, self._model, self._optimizer, self._config = world, model, optimizer, config
        self._batches, self._take, self._meters, self._emit = batches, take, meters, emit
        self._claim, self._claim_looked_at = claim, 0.0
        home = RunDir.of(config).checkpoints
        self._storage = open_storage(home, config.checkpoint.to, config.name)
        token = all_gather_texts(world, secrets.token_hex(4))[0]
        kept = config.checkpoint
        before = claim.check if claim is not None else None
        self._saver = Saver(
            self._storage,
            world,
            token,
            retention=Retention(kept.keep, kept.best),
            hooks=CommitHooks(before, self._tell_launcher),
            silence_s=config.timeout.step_s,
            whole=whole,
        )
        self._cadence = Cadence(
            Every.parse(kept.every),
            kept.mtbf_h * 3600.0,
            batches.plan.steps_per_epoch,
            time.monotonic(),
        )
        agree_s = AGREE_APART_S if config.local_sgd.steps else AGREE_S
        self.size_bytes = sum(
            value.nbytes
            for value in {**dict(named_state(model, optimizer)), **take.own_state()}.values()
        )
        self.request = StopRequest(
            self._deadline() if world.is_main else math.inf,
            self.size_bytes,
            0.0 if take.knows_all else agree_s,
        )
        self._agreement = Agreement(take, agree_s)
        self._saved_step = -1
        self._prepared = False
        self._step_begun = time.monotonic()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests to save and stop; whatever ends the run, a save under way is given its time."""
        if self._world.launcher_file is not None:
            handover.graceful_stop_mark(self._world.launcher_file, self._world.rank).touch(
                mode=0o600
            )
            if self._world.local_rank == 0:
                folder = str(RunDir.of(self._config).root.absolute())
                write_whole(
                    handover.run_file(self._world.launcher_file), os.fsencode(folder), durable=False
                )
        with self.request.listening():
            try:
                yield
            except BaseException:
                self._saver.give_up()
                raise

    def restore(self) -> int:
        """Go on from the newest good checkpoint; return its step, or 0."""
        if self._world.is_main:
            self._storage.sweep()
            if self._config.resume == "never":
                self._start_over()
        found = newest_good(
            self._storage, self._world, lambda step, why: self._emit(CheckpointBad(step, why))
        )
        if found is None:
            return 0
        self._refuse_another_training(found)
        self._load(found)
        self._saved_step = found.step
        self._tell_launcher(found.step)
        return found.step

    def _start_over(self) -> None:
        """Keep all checkpoints aside, once: a later start of the same launch or job goes on from those of the earlier ones."""
        mark = RunDir.of(self._config).started_over
        if (
            self._world.is_restart
            and mark.exists()
            and mark.read_text(encoding="utf-8") == self._world.launch
        ):
            return
        for step in self._storage.steps():
            self._storage.set_aside(step)
        write_whole(mark, self._world.launch.encode())

    def take(self, step: Any) -> Note:
        """Take one step, and ask with it for what this rank wants."""
        return self._take(step, self._asks)

    def _asks(self) -> RankRequests:
        self._check_claim()
        self.request.saving = self._saver.busy
        due = (
            self._world.is_main and self._cadence.due_at(time.monotonic()) and not self._saver.busy
        )
        return RankRequests(save=due, stop=self.request.asked)

    def _check_claim(self) -> None:
        """See about once a second that no later start of this job has taken the run over."""
        if self._claim is not None and time.monotonic() > self._claim_looked_at + _CLAIM_S:
            self._claim_looked_at = time.monotonic()
            self._claim.check()

    def after_step(self, note: Note, done: int, metrics: Mapping[str, float]) -> bool:
        """Save where that is due, and say what was saved; return whether all ranks stop here."""
        self._report_saves()
        if not self._prepared:
            self._prepared = True
            self._saver.prepare(
                dict(named_state(self._model, self._optimizer)), self._take.own_state()
            )
        step_s = (
            time.monotonic() - self._step_begun
        )  # with the reading of its samples, and the evaluation after it
        self._step_begun = time.monotonic()
        self.request.learn_step(step_s)
        save, stop = self._agreement.on(note, step_s)
        if save or stop or self._cadence.due_after(done):
            self.save(done, metrics)
        return stop

    def save(self, done: int, metrics: Mapping[str, float]) -> None:
        """Save all the state of the run, unless this very step is saved."""
        if done == self._saved_step:
            return
        self._saved_step = done
        self._cadence.begun(time.monotonic())
        draft = Manifest(
            step=done,
            samples=self._batches.plan.seen_after(done),
            files={},
            metrics=dict(metrics),
            values={
                "meters": {name: meter.state(self._take) for name, meter in self._meters.items()},
                "numbers": self._take.numbers(),
                "optimizer": optimizer_facts(self._optimizer),
                "dataset_samples": self._batches.plan.samples,
                "world_size": self._world.size,
                "precision": self._take.precision.state(),
            },
            config=dict(flatten(self._config)),
            versions={
                "paceline": VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
        self._saver.save(
            dict(named_state(self._model, self._optimizer)), draft, self._take.own_state()
        )

    def finish(self, *, in_time: bool = False) -> None:
        """Wait until the last save is complete, on every rank; unless time presses, also for old ones to be gone."""
        try:
            if in_time:
                self._saver.wait()
            else:
                self._saver.close()
        finally:
            self._report_saves()
        wait_for_all(
            self._world
        )  # rank 0 may serve the letters by which the others hear that all is well

    def _report_saves(self) -> None:
        try:
            while found := self._saver.finished():
                for saved in found:
                    self._learn(saved)
        except SaveFailed as error:
            self._emit(CheckpointFailed(error.step, error.problem))
            raise

    def _learn(self, saved: Saved) -> None:
        self._cadence.learn(saved.held_s, saved.total_s)
        self.request.learn_save(saved.total_s)
        facts = saved.manifest
        self._emit(
            CheckpointSaved(facts.step, saved.where, facts.size_bytes, saved.held_s, saved.total_s)
        )

    def _load(self, found: Manifest) -> None:
        saved = read_tensors(self._storage, found)
        replicas = [_replicas(config) for config in (found.config, dict(flatten(self._config)))]
        if replicas[0] != replicas[1]:
            raise ConfigError(
                f"{self._storage.where(found.step)} holds {replicas[0]} replicas that walk apart, and {replicas[1]} are wanted",
                fix="set local_sgd.steps and local_sgd.replicas as they were, or give this run another name=",
            )
        problems = self._take.load(saved, found.values["numbers"])
        kinds = [
            facts["optimizer"]
            for facts in (found.values["optimizer"], optimizer_facts(self._optimizer))
        ]
        if kinds[0] != kinds[1]:
            problems.insert(0, f"the optimizer was {kinds[0]}, is {kinds[1]}")
        if problems:
            raise ConfigError(
                f"{self._storage.where(found.step)} is of another model: {_some(problems)}",
                fix="build model and optimizer as they were, or give this run another name=",
            )
        self._take.precision.restore(found.values.get("precision", []))
        for name, meter in self._meters.items():
            meter.restore(
                found.values["meters"][name], mine=self._take.knows_all or self._world.is_main
            )

    def _refuse_another_training(self, found: Manifest) -> None:
        facts = optimizer_facts(self._optimizer) | {"dataset_samples": self._batches.plan.samples}
        now = dict(flatten(self._config)) | facts
        before = (
            dict(found.config)
            | dict(found.values["optimizer"])
            | {"dataset_samples": found.values["dataset_samples"]}
        )
        changed = [
            f"{name} was {before[name]}, is {value}"
            for name, value in now.items()
            if name not in _FREE
            and name.partition(".")[0] not in _FREE_TABLES
            and before.get(name, value) != value
        ]
        if changed and self._config.resume != "changed":
            raise ConfigError(
                f"{self._storage.where(found.step)} is of another training: {_some(changed)}",
                fix="give this run another name=, or go on with resume=changed, or start over with resume=never",
            )

    def _tell_launcher(self, step: int) -> None:
        """Let whoever starts this run again see that there was progress: only failures without any are counted."""
        if self._world.is_main and self._world.progress_file is not None:
            write_whole(self._world.progress_file, str(step).encode())

    def _deadline(self) -> float:
        after = self._config.stop_after
        return (
            min(self._world.deadline_s, time.time() + seconds_from(after))
            if after
            else self._world.deadline_s
        )


def _replicas(config: Mapping[str, Any]) -> int:
    """Return how many replicas walk apart in a run of such settings; 0: it is not of that kind."""
    return int(config["local_sgd.replicas"]) if int(config.get("local_sgd.steps", 0)) else 0


def _some(things: list[str], most: int = 8) -> str:
    """Return the first of many things.

    >>> _some(["a", "b", "c"], most=2)
    'a; b; and 1 more'
    """
    return "; ".join(
        things[:most] + ([f"and {len(things) - most} more"] if len(things) > most else [])
    )
