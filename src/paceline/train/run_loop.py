"""What a run does between two steps of its loop: report, evaluate, save, stop, record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from paceline.config import RunConfig
from paceline.data.reading.batches import Batches, RankBatch
from paceline.errors import Stopped
from paceline.events import (
    EpochDone,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    RunStopped,
    ScriptChanged,
    SetByScript,
    StepDone,
)
from paceline.exact.graph import CapturedUpdates, may_capture
from paceline.exact.local_sgd import ReplicaUpdates
from paceline.exact.row import RankRequests, StepSums
from paceline.exact.state import digests_of_all
from paceline.exact.step import Updates
from paceline.exact.strategy import Strategy
from paceline.launch.gc_pause import resume_gc
from paceline.scale.batch import StepPlan
from paceline.train.callbacks import Callbacks
from paceline.train.dataset_changes import DatasetChanges
from paceline.train.examiner import Examiner
from paceline.train.gpu_settings import describe_speed
from paceline.train.observers.console import describe_run, rank_line, say
from paceline.train.observers.meter import Meter, WarmUp
from paceline.train.observers.observers import Observers
from paceline.train.rates import Rates
from paceline.train.run_folder import RunFolder
from paceline.train.saving.checkpointing import Checkpoints, shorten
from paceline.train.saving.final_state import FinalState
from paceline.train.saving.run_state import Registered, RunState
from paceline.train.stopping import Stopping
from paceline.verified import what_is_shown
from paceline.world.device import peak_of_all
from paceline.world.process_group import shorten_timeout
from paceline.world.world import World

_STEPS_TO_TRY = 100
"""Steps, or an epoch if it is shorter, after which parameters without a gradient are named."""
_EARLY_COMPARISONS = frozenset({1, 3, 10, 30})
"""Steps of a start after which the ranks compare weights: a script that changes one rank only mostly does so at once."""

_MOST_VALUES = 4  # of one setting that the script decides itself; a value that changes in every step is reported as such


class ScriptSettings:
    """Emits an event for every new value that a script uses instead of a setting."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._known: dict[str, list[object]] = {}

    def note(self, step: int, setting: str, value: object, how: str) -> None:
        """Report a value the first time it is used; `how` says by what.

        >>> shown = []
        >>> settings = ScriptSettings(lambda event: shown.append(event.value))
        >>> for value in (1.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0):
        ...     settings.note(1, "clip_norm", value, "clip= of run.update")
        >>> shown
        ['1.0 by clip= of run.update', '5.0 by clip= of run.update', '6.0 by clip= of run.update', 'other values by clip= of run.update']
        """
        known = self._known.setdefault(setting, [])
        if value in known or len(known) == _MOST_VALUES:
            return
        known.append(value)
        shown = "other values" if len(known) == _MOST_VALUES else value
        self._emit(SetByScript(step, setting, f"{shown} by {how}"))


class RunLoop:
    """The loop of a run, from the newest checkpoint on. Every rank has one."""

    def __init__(
        self,
        world: World,
        config: RunConfig,
        strategy: Strategy,
        folder: RunFolder,
        parts: Registered,
        batches: Batches,
        flops_per_sample: float = 0.0,
        examiner: Examiner | None = None,
    ) -> None:
        self._world, self._config, self._folder = world, config, folder
        self._strategy, self._examiner = strategy, examiner
        self._parts, self.batches = parts, batches
        self._rates = Rates(config, parts, batches.total_samples)
        models, optimizers = list(parts.models.values()), list(parts.optimizers.values())
        kind = Updates
        if may_capture(world, config, strategy, optimizers):
            kind = CapturedUpdates
        elif strategy.replicas:
            kind = ReplicaUpdates
        total = batches.total_samples
        self.updates = kind(
            world, config, strategy, models, optimizers, total, self._requests, parts.rules
        )
        self._rates.least = self.updates.least_rate
        self._since_report, self._in_epoch, self._warm_up = Meter(), Meter(), WarmUp(config)
        meters = {"since_report": self._since_report, "in_epoch": self._in_epoch}
        self.state = RunState(world, config, parts, batches, self.updates, meters)
        size_bytes = self.state.size_bytes
        self._stopping = Stopping(world, config, self.updates, size_bytes)
        on_saved = self._stopping.request.learn_save
        self._checkpoints = Checkpoints(
            self.state, folder.emit, folder.claim, on_saved, folder.ahead
        )
        self._final = FinalState(world, self.state, self._checkpoints)
        self.observers = Observers(world, config, strategy, self.updates, folder.emit)
        peak = peak_of_all(world, config.precision) if flops_per_sample else 0.0
        self._mfu_per_rate = flops_per_sample / peak if peak else 0.0
        self.done = self._first = 0
        self._ended = False
        self.save_requested = False
        self.metrics: dict[str, float] = {}
        """Results of the last evaluation in this step."""
        self.logged: dict[str, float] = {}
        self._callbacks: Callbacks | None = None
        self.by_script = ScriptSettings(folder.emit)
        self.dataset_changes = DatasetChanges(batches, parts.tracked.objects.values())

    def notify(self, callbacks: Callbacks) -> None:
        """Let callbacks know of saves and stops."""
        self._checkpoints.before_save, self._callbacks = callbacks.save, callbacks

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Listen for signals, and observe."""
        with (
            self._stopping.listening(),
            self._checkpoints,
        ):
            self._checkpoints.find()
            with self.observers.attending(self.state.size_bytes):
                yield

    def begin(self) -> Iterator[RankBatch]:
        """Restore the newest checkpoint; return the steps that are left."""
        self.done = self._first = self._checkpoints.restore()
        changes = [self._rates.restored(self.state.rates_before, self._parts.rates)]
        changes += self.state.changes
        if not (
            self.is_over and self._folder.is_finished
        ):  # they would not be those it was trained with
            self._folder.write_settings(self._config)
            self.state.script.keep()
        self._announce()
        for sentence in filter(None, changes if self._world.is_main else ()):
            say(sentence)
        if self._examiner is not None:
            self._examiner.begin(self.done, self._strategy, self._parts, self.updates, self.state)
        resume_gc()
        if self.is_over:
            return iter(())
        return iter(self.observers.reading(self.batches.steps(self.done)))

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return bool(self.state.finished) or self.done >= self.batches.total_steps

    @property
    def is_first(self) -> bool:
        """Whether no step was completed since the start."""
        return self.done == self._first

    @property
    def steps_of_start(self) -> int:
        """How many steps were completed since the start."""
        return self.done - self._first

    def begin_step(self, batch: RankBatch) -> None:
        """Set the learning rates of a step."""
        self.dataset_changes.remember()
        self._warm_up.begin()
        self._rates.set(batch.plan.seen)
        if self._examiner is not None:
            self._examiner.before_step(batch.plan.index)

    def next_plan(self) -> StepPlan:
        """Return the plan of the next step, whose samples are not read yet."""
        self.metrics, self.logged = {}, {}
        return self.batches.plan.step(self.done)

    def refuse_changed_dataset(self) -> None:
        """Raise if the script has changed the dataset since the last step was read."""
        if not self.is_first:
            self.dataset_changes.refuse(self._epochs_around)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let an evaluation read the dataset of the training, and change it for that time."""
        with self.dataset_changes.reading(self._epochs_around):
            yield
        self.batches.forget_epoch()

    @property
    def _epochs_around(self) -> list[int]:
        """The epochs of the steps before and after now."""
        per_epoch = self.batches.plan.steps_per_epoch
        return [self.done // per_epoch, max(0, self.done - 1) // per_epoch]

    def evaluation_is_due(self, plan: StepPlan) -> bool:
        """Return whether to evaluate after a step; with local SGD within an epoch only after a synchronization."""
        done, every, replicas = (
            plan.index + 1,
            self._config.evaluate_steps,
            self._config.local_sgd,
        )
        if plan.ends_epoch or done == self.batches.total_steps:
            return True
        is_synchronized = not replicas.steps or (plan.within + 1) % replicas.steps == 0
        # An examiner sees the metrics of an epoch's end; if it does not reach one, those of its last step.
        examiner = self._examiner
        is_last = examiner is not None and plan.epoch == 0 and done == examiner.last_step
        is_due = (bool(every) and done % every == 0) or is_last
        return is_due and is_synchronized

    def complete(self, batch: RankBatch, sums: StepSums) -> bool:
        """Report a step, save and stop if that is due; return whether a measurement has enough steps.

        `sums` adds up the step's updates.
        """
        samples = batch.plan.samples
        self.observers.step_taken(samples)
        self.done = batch.plan.index + 1
        for meter in (self._since_report, self._in_epoch):
            meter.add(sums, samples)
        self._leave_out_warm_up(samples)
        self._report(batch)
        self.observers.step_done(self.done)
        if batch.plan.index == self._first:
            shorten_timeout(self._world, self._config)
        self._compare_ranks()
        self._mention_unused()
        self._mention_averaged()
        self._save_or_stop(sums)
        enough = False
        if self._examiner is not None:
            self._examiner.after_step(self.done, sums, self.metrics)
            enough = self.done == self._examiner.last_step
        return self.observers.seen_enough() or enough

    def _compare_ranks(self) -> None:
        """Compare the state of the ranks now and then; in the first steps only what is cheap: weights, rates, numbers."""
        every = self._config.compare_steps
        if every and self.done % every == 0:
            self.state.compare_ranks(self.done)
        elif every and self.done - self._first in _EARLY_COMPARISONS:
            self.state.compare_ranks(self.done, self.state.weights())

    def _leave_out_warm_up(self, samples: int) -> None:
        if self._warm_up.counts(samples):
            self.wait_for_losses()
            self.leave_out(self._warm_up.seconds, samples)

    def _report(self, batch: RankBatch) -> None:
        is_reported = self.done % self._config.log.every_steps == 0
        if is_reported:
            loss, speed = self._since_report.close(self.updates)
            epoch, seen = batch.plan.epoch + 1, batch.plan.seen
            lr, mfu = self._rates.now, speed * self._mfu_per_rate
            self._folder.emit(StepDone(self.done, epoch, seen, loss, lr, speed, mfu))
        if batch.plan.ends_epoch or self.done == self.batches.total_steps:
            self._end_epoch(batch)
        elif values := {**(self.logged if is_reported else {}), **self.metrics}:
            self._folder.emit(Evaluated(self.done, values))

    def _end_epoch(self, batch: RankBatch) -> None:
        loss, speed = self._in_epoch.close(self.updates)
        epoch, per_epoch = batch.plan.epoch + 1, self.batches.plan.steps_per_epoch
        epochs = -(-self.batches.total_steps // per_epoch)
        metrics = {**self.logged, **self.metrics}
        self._folder.emit(EpochDone(epoch, epochs, self.done, loss, speed, metrics))
        if self._config.log.ranks == "all":
            steps = self.done - (epoch - 1) * per_epoch
            say(rank_line(self._world, epoch, batch.lanes[0].samples, steps))
        self._in_epoch.restart()
        self._since_report.restart()

    def _mention_unused(self) -> None:
        """Name the parameters that nothing trains, once."""
        steps = self.done - self._first
        if steps != min(_STEPS_TO_TRY, self.batches.plan.steps_per_epoch):
            return
        names = self.updates.without_gradient
        if names and self._world.is_main:
            one = len(names) == 1
            say(
                f"{len(names)} {'parameter' if one else 'parameters'} got no gradient in the first {steps} steps: "
                f"{shorten(names)}. If this is intended, set requires_grad=False on {'it' if one else 'them'}"
            )

    def _mention_averaged(self) -> None:
        """Name the buffers that forward changes, and the rule by which they change, once."""
        names, lanes = self.updates.take_averaged_buffers(), self._config.batch.lanes
        if names and self._world.is_main:
            own = names[0].rpartition(".")[2]
            say(
                f"forward changes {shorten(names)}: in each step by the mean of the changes in the {lanes} lanes. If sums or "
                f'extremes are needed, give a rule: run.model(model, buffers={{"{own}": "sum"}}), or "max", "min", "last"'
            )

    def wait_for_losses(self) -> None:
        """Wait for the steps that the GPU has not finished: otherwise their time would be left out, too."""
        for meter in (self._since_report, self._in_epoch):
            meter.wait_for_losses()

    def leave_out(self, seconds: float, samples: int = 0) -> None:
        """Exclude the seconds of an evaluation, or of steps, from the speed; `wait_for_losses` was called before."""
        for meter in (self._since_report, self._in_epoch):
            meter.leave_out(seconds, samples)
        self._warm_up.leave_out(seconds)

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        """Let a debugger hold the run: the watchdog waits, and the time counts nowhere."""
        begun = time.perf_counter()
        with self.observers.hold(doing), self._folder.quiet():
            yield
        self.leave_out(time.perf_counter() - begun)
        self._stopping.leave_out(time.perf_counter() - begun)

    def _requests(self) -> RankRequests:
        """Return whether this rank asks to save or to stop after the current step."""
        is_due = self._checkpoints.is_due() or self.save_requested
        self._stopping.request.saving = self._checkpoints.is_saving
        return RankRequests(save=is_due, stop=self._stopping.request.asked)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save and stop."""
        request = self._stopping.request
        request.reason = request.reason or reason or "the script asked to stop"

    def agree_without_update(self) -> StepSums:
        """Return the requests of all ranks after a step without an update. Every rank must call this."""
        return self.updates.agree(StepSums().with_requests(self._requests()))

    def _save_or_stop(self, sums: StepSums) -> None:
        self._checkpoints.update()
        agreed = self._stopping.agree(sums)
        is_examined = self._examiner is not None and self.done == self._examiner.save_step
        wanted = agreed.save or agreed.stop or is_examined
        self.save_requested = self.save_requested and not wanted
        self._checkpoints.after_step(self.done, self.metrics, requested=wanted)
        if agreed.stop and not self.is_over:
            self._checkpoints.finish(in_time=True)
            reason = self._stopping.request.reason or "another rank was asked to stop"
            self._folder.emit(RunStopped(self.done, reason))
            if self._callbacks is not None:
                self._callbacks.stop(reason)
            raise Stopped(self.done)

    def end(self) -> None:
        """Save the run after its last step. Every rank must call this."""
        if self._ended:
            return
        self._ended = True
        self.observers.ending()
        if not self._config.only_measures:
            self._checkpoints.save(self.done, self.metrics)
        self._checkpoints.finish()
        if not self._config.only_measures:
            self._final.remember()
        self.observers.concluding()

    def conclude(self) -> None:
        """Report that the run is complete."""
        self.end()
        if not self._config.only_measures:
            self._final.keep(self.done)
        digest = self.state.digest(digests_of_all(self._world, self.updates.own_state()))
        self._folder.emit(RunEnded(self.done, self._in_epoch.run_seconds, digest))
        self._folder.remove_failure()

    def _what_is_shown(self) -> str:
        """Return what `paceline verify` has shown about this script, for the start of a run that may rely on it."""
        if not self._config.exact or self._config.only_measures or not self._world.is_main:
            return ""
        return what_is_shown(self.state.script.identity(), self.state.script.sources)

    def _announce(self) -> None:
        batch, world, plan = self._config.batch, self._world, self.batches.plan
        total = self.done if self.is_over else self.batches.total_steps
        summary = describe_run(self._config, world, self.batches, self._rates.description)
        if speed := describe_speed(self._config, world.device):
            summary += f"\n{speed}"
        if self.batches.is_notable:
            summary += f"\n{self.batches.description}"
        if shown := self._what_is_shown():
            summary += f"\n{shown}"
        self._folder.emit(
            RunStarted(
                world.size, world.device, world.launcher, plan.samples, plan.largest_step, batch.lanes,
                self._rates.now, total, summary, self.done,
            )
        )  # fmt: skip
        if self.state.script.change:
            self._folder.emit(ScriptChanged(self.done, self.state.script.change))
        for setting, value, how in self._rates.by_script:
            self.by_script.note(self.done, setting, value, how)
