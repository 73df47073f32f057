"""Console output of a training: lines, and a progress line on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from paceline import handover
from paceline.config import RunConfig
from paceline.data.reading.batches import Batches
from paceline.errors import STOPPED
from paceline.events import (
    TIME_LIMIT,
    CheckpointBad,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    FinalStateSaved,
    RunEnded,
    RunStarted,
    RunStopped,
    ScriptChanged,
    SlowRank,
    StepDone,
)
from paceline.scale.lr import describe_lr
from paceline.train.observers.progress import ProgressLine
from paceline.world.world import World


class Console:
    """The sink that prints. Each line is written in one call. `done` returns the completed steps."""

    def __init__(self, config: RunConfig, done: Callable[[], int] = lambda: 0) -> None:
        on_terminal = sys.stdout.isatty() or handover.TERMINAL in os.environ
        progress = config.log.progress
        self._draws = progress == "bar" or (progress == "auto" and on_terminal)
        self.progress = ProgressLine(done, in_color=on_terminal)

    def __call__(self, event: Event) -> None:
        """Print a line for an event, or note it for the progress line."""
        if isinstance(event, SlowRank):
            self.progress.slow_rank = describe_slow_rank(event)
        if isinstance(event, StepDone):
            self.progress.newest = event
        if line := line_of(event):
            say(line)
        if isinstance(event, RunStarted) and self._draws:
            self.progress.start(event)


def line_of(event: Event) -> str:  # noqa: C901, PLR0911 - one for each kind
    """Return the line for an event; empty for events that are not printed."""
    match event:
        case RunStarted():
            return event.summary + _describe_start(event)
        case Evaluated():
            return f"step {event.step:,}{metrics_text(event.metrics)}"
        case EpochDone():
            return epoch_line(event)
        case CheckpointSaved():
            return f"saved {event.path} ({event.size_bytes / 1e6:.1f} MB)"
        case FinalStateSaved():
            return (
                f"saved {event.path} ({event.size_bytes / 1e6:.1f} MB): the script changed the model after the loop "
                f"({event.changed}). `paceline ckpt export` takes these weights; a resume loads the checkpoint of step {event.step:,}"
            )
        case CheckpointBad():
            return f"skipped: {event.reason}"
        case SlowRank():
            return event.sentence
        case ScriptChanged():
            return f"the script has {event.reason}"
        case RunStopped():
            return stopped_line(event)
        case RunEnded():
            return f"done: {event.step:,} steps in {event.seconds:.1f} s; weights and optimizer state {event.digest[:16]}"
    return ""


def _describe_start(event: RunStarted) -> str:
    if event.from_step >= event.total_steps:
        return "\nthis run is complete: train longer with epochs=, start over with resume=never, or choose another name="
    return f"\nresumed after step {event.from_step:,}" if event.from_step else ""


def stopped_line(event: RunStopped) -> str:
    """Return the reason of a stop, the step, and how to resume.

    >>> stopped_line(RunStopped(595, "Ctrl-C"))
    'Stopped by Ctrl-C at step 595, checkpoint saved (exit code 75). Rerun the same command to resume.'
    >>> stopped_line(RunStopped(5, "the time limit is near"))
    'Stopped before the time limit at step 5, checkpoint saved (exit code 75). Rerun the same command to resume.'
    """
    if event.reason == TIME_LIMIT:
        cause = " before the time limit"
    elif event.reason.startswith(("SIG", "Ctrl-C")):
        cause = f" by {event.reason}"
    else:
        cause = f" ({event.reason})"
    saved = f"at step {event.step:,}, checkpoint saved (exit code {STOPPED})"
    return f"Stopped{cause} {saved}. Rerun the same command to resume."


def describe_run(config: RunConfig, world: World, batches: Batches, lr: str = "") -> str:
    """Return the derived numbers of a run, printed once at its start."""
    plan = batches.plan
    lanes = describe_lanes(plan.largest_step, config.batch.lanes, world.size)
    if plan.largest_step < plan.global_size:
        lanes += f"; batch.global_size={plan.global_size}, but an epoch has {_count(plan.samples, 'sample')}"
    launcher = "single process" if world.launcher == "alone" else f"started by {world.launcher}"
    exact = "exact=false: gradients are added in any order"
    if config.exact:
        exact = "exact: sums, order of samples and seeds do not depend on the ranks"
    return (
        f"{describe_promise(config.batch.lanes, most_ranks(config), exact=config.exact)}\n"
        f"{lanes}; {lr or describe_lr(config)}\n"
        f"{plan.samples:,} samples, {batches.total_steps:,} steps; {world.device}; "
        f"{launcher}; {exact}" + describe_local_sgd(config)
    )


def most_ranks(config: RunConfig) -> int:
    """Return the largest number of ranks on which a run can be continued."""
    if config.parallel == "none":
        return 1
    return config.local_sgd.replicas if config.local_sgd.steps else config.batch.lanes


def describe_promise(lanes: int, most: int, *, exact: bool) -> str:
    """Return on how many ranks a run can be continued, and whether with the same bits.

    >>> describe_promise(8, 8, exact=True), describe_promise(8, 8, exact=False), describe_promise(1, 1, exact=True)
    ('8 lanes: the same bits on 1 to 8 ranks', '8 lanes: 1 to 8 ranks', '1 lane: the same bits on 1 rank')
    """
    ranks = "1 rank" if most == 1 else f"1 to {most} ranks"
    return f"{_count(lanes, 'lane')}: {'the same bits on ' if exact else ''}{ranks}"


def describe_local_sgd(config: RunConfig) -> str:
    """Return the number of replicas and when they synchronize; empty without local SGD.

    >>> describe_local_sgd(RunConfig())
    ''
    """
    settings = config.local_sgd
    if not settings.steps:
        return ""
    replicas, steps = _count(settings.replicas, "replica"), _count(settings.steps, "step")
    return f"; local SGD: {replicas}, synchronized every {steps}"


def describe_lanes(batch: int, lanes: int, ranks: int) -> str:
    """Return how a batch is split into lanes, and how many lanes each rank runs.

    >>> describe_lanes(1024, 8, 2), describe_lanes(10, 4, 3), describe_lanes(32, 1, 1)
    ('global batch 1024 = 8 lanes x 128; 2 ranks, 4 lanes each', 'global batch 10 = 4 lanes x 2-3; 3 ranks, 1-2 lanes each', 'global batch 32 = 1 lane x 32; 1 rank')
    """
    samples = _per(batch, lanes)
    split = f"global batch {batch} = {_count(lanes, 'lane')} x {samples}; {_count(ranks, 'rank')}"
    if ranks == 1:
        return split
    each = _per(lanes, ranks)
    return f"{split}, {each} lane{'' if each == '1' else 's'} each"


def _per(amount: int, parts: int) -> str:
    least, most = amount // parts, -(-amount // parts)
    return str(least) if least == most else f"{least}-{most}"


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def epoch_line(event: EpochDone) -> str:
    """Return loss, metrics and speed of an epoch.

    >>> epoch_line(EpochDone(epoch=3, epochs=10, step=9, loss=0.12341, samples_per_s=41200.0, metrics={"eval_loss": 0.2, "acc": 0.9731}))
    'epoch 3/10  loss 0.1234  acc 0.9731  41,200 samples/s'
    """
    start = f"epoch {event.epoch}/{event.epochs}  loss {event.loss:.4f}"
    return f"{start}{metrics_text(event.metrics)}  {event.samples_per_s:,.0f} samples/s"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the metrics; the evaluation loss only if there are no others."""
    shown = {name: value for name, value in metrics.items() if name != "eval_loss"} or metrics
    return "".join(f"  {name} {value:.4f}" for name, value in shown.items())


def describe_slow_rank(event: SlowRank) -> str:
    """Return the text beside the progress bar while a rank is slow; empty once it is not.

    >>> describe_slow_rank(SlowRank(9, 3, "n1", "data", "chronic", 0.1, 2.0, ""))
    '  slow: rank 3 (data)'
    """
    return f"  slow: rank {event.rank} ({event.phase})" if event.kind == "chronic" else ""


def rank_line(world: World, epoch: int, micro_batch: int, steps: int) -> str:
    """Return what one rank did in an epoch.

    >>> rank_line(World(rank=1, size=2, device="cuda:1"), epoch=3, micro_batch=128, steps=59)
    'rank 1  device cuda:1  epoch 3  micro-batch 128  steps 59'
    """
    return f"rank {world.rank}  device {world.device}  epoch {epoch}  micro-batch {micro_batch}  steps {steps}"


def say(text: str) -> None:
    """Print lines in one write, so that those of several ranks do not mix; our launcher shows them without the rank."""
    if handover.FAILURE in os.environ:
        text = "\n".join(f"{handover.FOR_ALL_RANKS}{line}" for line in text.split("\n"))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
