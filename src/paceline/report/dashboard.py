"""The state of a run on a terminal: printed once, or as a live view."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.plot.text import column_means, is_steep, text_curve
from paceline.report.jobs import GONE, UNKNOWN, RunJob
from paceline.report.state import RunState, RunWatcher
from paceline.telemetry.stragglers import describe_straggler
from paceline.terminal import console, drawn, plain
from paceline.units import human_loss, human_size, human_time

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_LABEL = 7  # columns
_BAR = 24
_CURVE_ROWS = 3
_WIDEST_CURVE = 60
_BESIDE_CURVE = 20
_SHOWN_JOBS = 4
_ALL_ROWS = 1000
_NOTICES_RESIZE_S = 0.2

_PHASES = {
    "not started": "not started",
    "waiting": "waiting in the queue",
    "starting": "starting",
    "training": "training",
    "suspended": "suspended",
    "unresponsive": "unresponsive: no rank makes progress",
    "stopped": "stopped, checkpoint saved; rerun the same command to resume",
    "failed": "failed",
    "lost": (
        "lost: it was killed, or its node went down; "
        "rerun the same command to resume from the newest checkpoint, if there is one"
    ),
    "ended": "finished",
}
_STYLES = {
    "training": "blue", "ended": "green", "failed": "bold red", "lost": "bold red", "suspended": "yellow", "unresponsive": "bold red",
}  # fmt: skip
_NOW = {"training", "suspended", "unresponsive"}

Row = tuple[str, "str | RenderableType"]


def print_state(state: RunState) -> None:
    """Print the state once: wrapped on a terminal, one line per row elsewhere."""
    if sys.stdout.isatty():
        _replace_unknown_characters()
        out = console()
        out.print(frame(state, out, _ALL_ROWS))
        return
    encoding = sys.stdout.encoding or "utf-8"
    text = "\n".join(lines_of(state)).encode(encoding, "replace").decode(encoding)
    print(text, flush=True)


def follow(watcher: RunWatcher, every_s: float) -> None:
    """Show the state until the run is over or Ctrl-C is pressed, then leave the last one on the terminal."""
    from rich.live import Live

    _replace_unknown_characters()
    out = console()
    state = watcher.look()
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            live.update(frame(state, out, out.height), refresh=True)
            while not state.over:
                _wait(out, every_s)
                state = watcher.look()
                live.update(frame(state, out, out.height), refresh=True)
    except KeyboardInterrupt:
        pass
    print_state(state)


def _wait(out: Console, seconds: float) -> None:
    """Wait, but not longer than until the terminal has another size."""
    size, limit = out.size, time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0 and out.size == size:
        time.sleep(min(left, _NOTICES_RESIZE_S))


def _replace_unknown_characters() -> None:
    """Let output go on where a terminal has no character for a curve or a name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def lines_of(state: RunState, width: int = 1 << 15, height: int = _ALL_ROWS) -> list[str]:
    """Return the state as lines of plain text within a size."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=width, color_system=None)
    return drawn(frame(state, out, height), width)[:height]


def frame(state: RunState, out: Console, height: int) -> RenderableType:
    """Return the state as rich draws it; the end of the log gets the rows that are left."""
    from rich.console import Group
    from rich.text import Text

    facts = _grid(state, out.width)
    used = len(out.render_lines(facts, out.options.update(width=out.width), pad=False))
    left = height - used - 2  # an empty row, and the name of the log
    if not state.log or left < 0:
        return facts
    title = Text.assemble((f"{'log':<{_LABEL}}", "dim"), plain(state.log))
    tail = [f"  {plain(line)}" for line in state.log_tail[-left:]] if left else []
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in tail]
    return Group(facts, Text(""), title, *lines)


def _grid(state: RunState, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid()
    grid.add_column(width=_LABEL, style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in _rows(state, width):
        style = _STYLES.get(state.phase, "") if label == "state" else ""
        text = Text(plain(content), style=style) if isinstance(content, str) else content
        grid.add_row(label, text)
    return grid


def _rows(state: RunState, width: int) -> Iterator[Row]:
    yield "run", f"{state.name}  {state.folder}"
    yield "state", _state(state)
    if state.hang:
        yield "hang" if state.phase in _NOW else "before", state.hang.sentence
    jobs = state.live_jobs or list(state.jobs[-1:])
    for job in jobs[:_SHOWN_JOBS]:
        yield "job", job_line(job)
        if job.problem:
            yield "", job.problem
    if len(jobs) > _SHOWN_JOBS:
        yield "", f"and {len(jobs) - _SHOWN_JOBS} more"
    if state.queue_problem:
        yield "", f"Slurm does not answer: {state.queue_problem}"
    if state.total_steps:
        yield "step", _step(state)
        yield from _loss(state, width)
        if state.metrics:
            yield "eval", _evaluation(state)
        yield "speed", _speed(state)
        yield "saved", _saved(state)
        yield "ranks", _ranks(state)
        if state.pids:
            yield "pids", pids_line(state.pids)


def _state(state: RunState) -> str:
    text = _PHASES[state.phase]
    if state.phase == "waiting" and state.total_steps:
        text = "waiting in the queue, to resume"
    reason = f" ({state.reason})" if state.reason else ""
    restarts = f"; started {state.restarts + 1} times" if state.restarts else ""
    return f"{text}{reason}{restarts}"


def job_line(job: RunJob) -> str:
    """Return a job's id, state, nodes and times.

    >>> job_line(RunJob("17", "PENDING", "", "Resources", "0:00", "2:00:00", 2, starts="2030-01-01T10:00:00"))
    '17  PENDING: Resources; expected to start 2030-01-01T10:00:00; requests 2 nodes for 2:00:00'
    >>> job_line(RunJob("18", "RUNNING", "", "", "0:12", "1:59:48", 1, "n1", requeues=2))
    '18  RUNNING on n1; 0:12 used, 1:59:48 left; requeued 2 times'
    """
    if job.state in {GONE, UNKNOWN}:
        return f"{job.job}  {'has left the queue' if job.state == GONE else 'state unknown'}"
    parts = [f"{job.job}  {job.state}{f': {job.reason}' if job.reason else ''}"]
    if job.waits:
        if job.starts:
            parts.append(f"expected to start {job.starts}")
        parts.append(f"requests {_count(job.nodes, 'node')} for {job.left}")
    elif job.live:
        parts[0] += f" on {job.node_list or f'{job.nodes} nodes'}"
        parts.append(f"{job.used} used, {job.left} left")
    if job.requeues:
        parts.append(f"requeued {_count(job.requeues, 'time')}")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _step(state: RunState) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=state.total_steps, completed=state.step, width=_BAR)
    share = 100 * state.step / state.total_steps
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(f"{state.step:,} of {state.total_steps:,}", bar, f"{share:.1f} %")
    return row


def _loss(state: RunState, width: int) -> Iterator[Row]:
    if not math.isfinite(state.loss):
        yield "loss", "none yet"
        return
    yield "loss", human_loss(state.loss)
    losses = [loss for loss in state.losses if math.isfinite(loss)]
    columns = min(_WIDEST_CURVE, width - _LABEL - _BESIDE_CURVE)
    if len(losses) > 1 and columns > 4:
        rows = text_curve(losses, columns, _CURVE_ROWS)
        for row, text in zip(rows, _beside_curve(losses, columns), strict=True):
            yield "", f"{row}  {text}".rstrip()


def _beside_curve(losses: Sequence[float], columns: int) -> tuple[str, str, str]:
    scale = "logarithmic" if is_steep(column_means(losses, columns)) else ""
    return f"highest {human_loss(max(losses))}", scale, f"lowest {human_loss(min(losses))}"


def _evaluation(state: RunState) -> str:
    metrics = ", ".join(f"{name} {human_loss(value)}" for name, value in state.metrics.items())
    return f"{metrics} (step {state.metrics_step:,})"


def _speed(state: RunState) -> str:
    if not state.samples_per_s > 0:
        return "not known yet"
    speed = f"{state.samples_per_s:,.0f} samples/s"
    if state.phase == "training" and math.isfinite(state.left_s):
        return f"{speed}, {human_time(state.left_s)} left"
    return speed


def _saved(state: RunState) -> str:
    saved = state.checkpoint
    if saved is None:
        return "no checkpoint yet"
    return f"step {saved.step:,}, {human_time(saved.age_s)} ago, {human_size(saved.size_bytes)}"


def pids_line(pids: Sequence[int]) -> str:
    """Return the processes of the ranks of this host.

    >>> pids_line([4711, 4712])
    'rank 0: 4711, rank 1: 4712'
    """
    return ", ".join(f"rank {rank}: {pid}" for rank, pid in enumerate(pids))


def _ranks(state: RunState) -> str:
    ranks = f"{state.world_size} on {state.device.partition(':')[0]}"
    if state.slowest is not None:
        return f"{ranks}; {describe_straggler(state.slowest)}"
    if state.world_size < 2 or state.phase != "training":
        return ranks
    if state.ranks_seen < state.world_size:
        return f"{ranks}, {state.ranks_seen} of them have reported so far"
    return f"{ranks}, no slow rank"
