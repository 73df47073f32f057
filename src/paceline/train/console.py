"""What a person sees while a run trains: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from paceline import handover
from paceline.config import RunConfig
from paceline.data.reading.batches import Batches
from paceline.events import (
    CheckpointBad,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    RunStopped,
    SlowRank,
    StepDone,
)
from paceline.scale.lr import describe_lr
from paceline.world.world import World

_BAR_WIDTH = 24


class Console:
    """The sink that prints. Each line is written whole, in one call."""

    def __init__(self, config: RunConfig) -> None:
        watched = sys.stdout.isatty() or handover.TERMINAL in os.environ
        self._bar = config.log.progress == "bar" or (config.log.progress == "auto" and watched)
        self._total_steps = 0
        self._slow = ""

    def __call__(self, event: Event) -> None:
        """Print what a person wants to know of an event."""
        if isinstance(event, RunStarted):
            self._total_steps = event.total_steps
        if isinstance(event, SlowRank):
            self._slow = slow_words(event)
        if isinstance(event, StepDone) and self._bar:
            say(bar_line(event, self._total_steps) + self._slow, end="\r")
        elif line := line_of(event):
            say(
                line
                + (
                    " " * _BAR_WIDTH
                    if self._bar and isinstance(event, EpochDone | Evaluated | SlowRank)
                    else ""
                )
            )


def line_of(event: Event) -> str:  # noqa: PLR0911 - one for each kind
    """Return an event in words; empty: it is not for everybody to read."""
    match event:
        case RunStarted():
            return event.summary + _goes_on(event)
        case Evaluated():
            return f"step {event.step:,}{metrics_text(event.metrics)}"
        case EpochDone():
            return epoch_line(event)
        case CheckpointSaved():
            return f"saved {event.path} ({event.size_bytes / 1e6:.1f} MB)"
        case CheckpointBad():
            return f"passed over: {event.reason}"
        case SlowRank():
            return event.sentence
        case RunStopped():
            return f"stopped after step {event.step:,} ({event.reason}), and saved; the same command goes on from here"
        case RunEnded():
            return f"done: {event.step:,} steps in {event.seconds:.1f} s; weights and optimizer state {event.digest[:16]}"
    return ""


def _goes_on(event: RunStarted) -> str:
    if event.from_step == event.total_steps:
        return "\nthis run is complete: train it longer with epochs=, start over with resume=never, or give another name="
    return f"\nresumed after step {event.from_step:,}" if event.from_step else ""


def describe_run(config: RunConfig, world: World, batches: Batches) -> str:
    """Return the derived numbers of a run, said once at its start."""
    exact = (
        "exact: the same bits on any number of ranks"
        if config.exact
        else "exact=false: summed in any order"
    )
    return (
        f"{describe_lanes(config.batch.global_size, config.batch.lanes, world.size)}; {describe_lr(config)}\n"
        f"{batches.plan.samples:,} samples, {batches.total_steps:,} steps; device {world.device}; "
        f"started by {world.launcher}; {exact}" + describe_local(config)
    )


def describe_local(config: RunConfig) -> str:
    """Return how replicas walk apart, if they do.

    >>> describe_local(RunConfig())
    ''
    """
    local = config.local_sgd
    return (
        f"; {_count(local.replicas, 'replica')}, which meet after {_count(local.steps, 'step')}"
        if local.steps
        else ""
    )


def describe_lanes(batch: int, lanes: int, ranks: int) -> str:
    """Return how a batch is cut and shared.

    >>> describe_lanes(1024, 8, 2), describe_lanes(10, 4, 3), describe_lanes(32, 1, 1)
    ('global batch 1024 = 8 lanes x 128; 2 ranks, 4 lanes each', 'global batch 10 = 4 lanes x 2-3; 3 ranks, 1-2 lanes each', 'global batch 32 = 1 lane x 32; 1 rank')
    """
    cut = f"global batch {batch} = {_count(lanes, 'lane')} x {_per(batch, lanes)}; {_count(ranks, 'rank')}"
    share = _per(lanes, ranks)
    return cut if ranks == 1 else f"{cut}, {share} lane{'' if share == '1' else 's'} each"


def _per(amount: int, parts: int) -> str:
    least, most = amount // parts, -(-amount // parts)
    return str(least) if least == most else f"{least}-{most}"


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def epoch_line(event: EpochDone) -> str:
    """Return the line of an epoch.

    >>> epoch_line(EpochDone(epoch=3, epochs=10, step=9, loss=0.12341, samples_per_s=41200.0, metrics={"eval_loss": 0.2, "acc": 0.9731}))
    'epoch 3/10  loss 0.1234  acc 0.9731  41,200 samples/s'
    """
    found = (
        f"epoch {event.epoch}/{event.epochs}  loss {event.loss:.4f}{metrics_text(event.metrics)}"
    )
    return f"{found}  {event.samples_per_s:,.0f} samples/s"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the metrics; the loss of the evaluation only if there is nothing else."""
    shown = {name: value for name, value in metrics.items() if name != "eval_loss"} or metrics
    return "".join(f"  {name} {value:.4f}" for name, value in shown.items())


def bar_line(event: StepDone, total: int) -> str:
    """Return the progress bar after a step.

    >>> bar_line(StepDone(step=50, epoch=1, samples=0, loss=0.5, lr=0.1, samples_per_s=1000.0), total=100)
    '━━━━━━━━━━━━············ step 50/100  loss 0.5000  1,000 samples/s'
    >>> bar_line(StepDone(step=9, epoch=1, samples=0, loss=0.5, lr=0.1, samples_per_s=9.0, mfu=0.478), total=9)[-30:]
    '0.5000  9 samples/s  MFU 47.8%'
    """
    filled = _BAR_WIDTH * event.step // max(1, total)
    bar = "━" * filled + "·" * (_BAR_WIDTH - filled)
    share = f"  MFU {event.mfu:.1%}" if event.mfu else ""
    return f"{bar} step {event.step:,}/{total:,}  loss {event.loss:.4f}  {event.samples_per_s:,.0f} samples/s{share}"


def slow_words(event: SlowRank) -> str:
    """Return what the progress bar says of a slow rank, with the room that the words before it took.

    >>> slow_words(SlowRank(9, 3, "n1", "data", "chronic", 0.1, 2.0, ""))
    '  slow: rank 3 (data)'
    """
    return (
        f"  slow: rank {event.rank} ({event.phase})"
        if event.kind == "chronic"
        else " " * _BAR_WIDTH
    )


def rank_line(world: World, epoch: int, micro_batch: int, steps: int) -> str:
    """Return what one rank did in an epoch.

    >>> rank_line(World(rank=1, size=2, device="cuda:1"), epoch=3, micro_batch=128, steps=59)
    'rank 1  device cuda:1  epoch 3  micro-batch 128  steps 59'
    """
    return f"rank {world.rank}  device {world.device}  epoch {epoch}  micro-batch {micro_batch}  steps {steps}"


def say(text: str, end: str = "\n") -> None:
    """Print a line in one write, so that lines of several ranks cannot be glued."""
    sys.stdout.write(text + end)
    sys.stdout.flush()
