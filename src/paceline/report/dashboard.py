"""How a run looks on a terminal: its state as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from paceline.plot.text import column_means as thinned
from paceline.plot.text import is_steep
from paceline.plot.text import text_curve as curve
from paceline.report.jobs import GONE, UNKNOWN, RunJob
from paceline.report.state import RunState
from paceline.telemetry.stragglers import IN_WORDS, in_words
from paceline.terminal import fit
from paceline.units import human_loss, human_size, human_time, short_time

_LABEL = 7
_BAR = 24
_CURVE_ROWS = 3
_WIDEST_CURVE = 60
_SHOWN_JOBS = 4

_SAID = {
    "not started": "not started yet",
    "waiting": "waiting in the queue",
    "starting": "starting",
    "training": "training",
    "stopped": "stopped and saved; starting it again goes on from there",
    "failed": "failed",
    "lost": "gone without a word: it was killed, or its node went down; starting it again goes on from its newest checkpoint",
    "ended": "ended: all steps are done",
}


def lines_of(state: RunState, width: int, height: int) -> list[str]:
    """Return what is to be seen, no wider and no higher than the terminal; the tail of the log takes what room is left."""
    above = list(_facts(state, width))
    shown = [fit(line, width) for line in above[:height]]
    room = height - len(shown) - 1
    if state.log and room > 0:
        last = state.log_tail[-room + 1 :] if room > 1 else ()
        shown += [
            "",
            fit(_labelled("log", state.log), width),
            *(fit(f"  {line}", width) for line in last),
        ]
    return shown[:height]


def _facts(state: RunState, width: int) -> Iterator[str]:
    yield _labelled("run", f"{state.name}  {state.folder}")
    yield _labelled("state", _state(state))
    if state.hang:
        yield _labelled("stuck" if state.phase == "training" else "before", state.hang.sentence)
    jobs = state.live_jobs or list(state.jobs[-1:])
    for job in jobs[:_SHOWN_JOBS]:
        yield _labelled("job", job_line(job))
    if len(jobs) > _SHOWN_JOBS:
        yield _labelled("", f"and {len(jobs) - _SHOWN_JOBS} more")
    if state.queue_problem:
        yield _labelled("", f"Slurm does not tell: {state.queue_problem}")
    if state.total_steps:
        yield _labelled("step", _step(state))
        yield from _loss(state, width)
        if state.metrics:
            yield _labelled("eval", _evaluation(state))
        yield _labelled("speed", _speed(state))
        yield _labelled("saved", _saved(state))
        yield _labelled("ranks", _ranks(state))


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _state(state: RunState) -> str:
    said = _SAID[state.phase]
    if state.phase == "waiting" and state.total_steps:
        said = "waiting in the queue, to go on"
    reason = f" ({state.reason})" if state.reason else ""
    restarts = f"; started {state.restarts + 1} times" if state.restarts else ""
    return f"{said}{reason}{restarts}"


def job_line(job: RunJob) -> str:
    """Return what is to be said of a job.

    >>> job_line(RunJob("17", "PENDING", "", "Resources", "0:00", "2:00:00", 2, starts="2030-01-01T10:00:00"))
    '17  PENDING: Resources; expected to start 2030-01-01T10:00:00; asks for 2 nodes, 2:00:00'
    >>> job_line(RunJob("18", "RUNNING", "", "", "0:12", "1:59:48", 1, "n1", requeues=2))
    '18  RUNNING on n1; 0:12 used, 1:59:48 left; requeued 2 times'
    """
    if job.state in {GONE, UNKNOWN}:
        return f"{job.job}  {'has left the queue' if job.state == GONE else 'state not known'}"
    parts = [f"{job.job}  {job.state}{f': {job.reason}' if job.reason else ''}"]
    if job.waits:
        parts += [f"expected to start {job.starts}"] if job.starts else []
        parts += [f"asks for {job.nodes} node{'' if job.nodes == 1 else 's'}, {job.left}"]
    elif job.live:
        parts = [
            f"{parts[0]} on {job.node_list or f'{job.nodes} nodes'}",
            f"{job.used} used, {job.left} left",
        ]
    if job.requeues:
        parts.append(f"requeued {job.requeues} time{'' if job.requeues == 1 else 's'}")
    return "; ".join(parts)


def _step(state: RunState) -> str:
    filled = _BAR * state.step // max(1, state.total_steps)
    share = 100 * state.step / max(1, state.total_steps)
    return f"{state.step:,} of {state.total_steps:,}  {'━' * filled}{'·' * (_BAR - filled)}  {share:.1f} %"


def _loss(state: RunState, width: int) -> Iterator[str]:
    finite = [loss for loss in state.losses if math.isfinite(loss)]
    if not math.isfinite(state.loss):
        yield _labelled("loss", "none yet")
        return
    room = min(_WIDEST_CURVE, width - _LABEL - 20)
    rows = curve(finite, room, _CURVE_ROWS) if len(finite) > 1 and room > 4 else []
    yield _labelled("loss", human_loss(state.loss))
    for row, edge in zip(rows, _edges(finite, room) if rows else (), strict=True):
        yield _labelled("", f"{row}  {edge}".rstrip())


def _edges(losses: Sequence[float], room: int) -> tuple[str, str, str]:
    scale = "logarithmic" if is_steep(thinned(losses, room)) else ""
    return f"highest {human_loss(max(losses))}", scale, f"lowest {human_loss(min(losses))}"


def _evaluation(state: RunState) -> str:
    told = ", ".join(f"{name} {human_loss(value)}" for name, value in state.metrics.items())
    return f"{told} (step {state.metrics_step:,})"


def _speed(state: RunState) -> str:
    if not state.samples_per_s > 0:
        return "not known yet"
    left = (
        f", {human_time(state.left_s)} left"
        if state.phase == "training" and math.isfinite(state.left_s)
        else ""
    )
    return f"{state.samples_per_s:,.0f} samples/s{left}"


def _saved(state: RunState) -> str:
    saved = state.checkpoint
    if saved is None:
        return "no checkpoint yet"
    return f"step {saved.step:,}, {human_time(saved.age_s)} ago, {human_size(saved.size_bytes)}"


def _ranks(state: RunState) -> str:
    ranks = f"{state.world_size} on {state.device.partition(':')[0]}"
    slow = state.slowest
    if slow is None:
        return (
            ranks
            if state.world_size < 2 or state.phase != "training"
            else f"{ranks}, {_even(state)}"
        )
    if slow.kind == "one-off":
        return f"{ranks}; {in_words(slow)}"
    return (
        f"{ranks}; slowest is rank {slow.beat.rank} on {slow.beat.node}: {short_time(slow.beat.own_s)} a step of its own, "
        f"{slow.times:.1f} x the others, {short_time(slow.more_s)} more in {IN_WORDS.get(slow.phase, slow.phase)}"
    )


def _even(state: RunState) -> str:
    seen, ranks = state.ranks_seen, state.world_size
    return (
        "none clearly slower than the others"
        if seen == ranks
        else f"{seen} of them have reported so far"
    )
