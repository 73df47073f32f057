"""Where does a step's time go on a rank? From its trace and its phases to seconds of five kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.measure.trace import Event, RankTrace
from paceline.measure.trace_intervals import Spans, difference, intersection, length, union
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.phases import PHASES, PhaseTime

KINDS = ("compute", "exposed_communication", "data_wait", "optimizer", "host_gaps")

_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Shares:
    """Seconds a step of one rank; together they are the step."""

    compute: float
    """Forward and backward at work: in torch's operations on a CPU, in kernels on a GPU."""
    exposed_communication: float
    """Waiting for other ranks or sending, with nothing else going on."""
    data_wait: float
    """Waiting for samples."""
    optimizer: float
    """Changing the weights."""
    host_gaps: float
    """Nothing of that: Python between operations, garbage collection, logs, saves; on a GPU, kernels that come too late."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return float(sum(asdict(self).values()))


def shares_of(trace: RankTrace) -> Shares:
    """Return where the steps of a window went on a rank, a step."""
    window = [(trace.begin, trace.end)]
    found = (
        _on_gpu(trace, window)
        if any(_is_kernel(event) for event in trace.events)
        else _on_cpu(trace, window)
    )
    scale = 1e-6 / max(1, int(trace.facts["steps"]))
    compute, wait, data, update = (length(spans) * scale for spans in found)
    left = max(0.0, length(window) * scale - compute - wait - data - update)
    return Shares(compute, wait, data, update, left)


def _on_cpu(trace: RankTrace, window: Spans) -> tuple[Spans, Spans, Spans, Spans]:
    work = union([*_phase(trace, "forward"), *_phase(trace, "backward")])
    wait = _phase(trace, "wait")
    if work:
        work = intersection(work, _spans(trace, lambda event: event.get("cat") == "cpu_op"))
    else:  # slices of a model are sent in the midst of forward and backward
        work = intersection(
            wait, _spans(trace, lambda event: str(event.get("name", "")).startswith("aten::"))
        )
        wait = difference(intersection(wait, _spans(trace, _sends)), work)
    parts = work, wait, _phase(trace, "data"), _phase(trace, "optimizer")
    compute, wait, data, update = (intersection(part, window) for part in parts)
    return compute, wait, data, update


def _on_gpu(trace: RankTrace, window: Spans) -> tuple[Spans, Spans, Spans, Spans]:
    sending = intersection(_spans(trace, lambda event: _is_kernel(event) and _sends(event)), window)
    working = intersection(
        _spans(trace, lambda event: _is_kernel(event) and not _sends(event)), window
    )
    updating = intersection(working, _spans(trace, _is_update))
    idle = difference(difference(window, working), sending)
    data = intersection(idle, _phase(trace, "data"))
    wait = (
        intersection(idle, _phase(trace, "wait")) if not sending else []
    )  # gloo: messages are no kernels
    return (
        difference(working, updating),
        union([*difference(sending, working), *wait]),
        data,
        updating,
    )


def _phase(trace: RankTrace, name: str) -> Spans:
    """Return when a rank was in a phase; garbage collections lie within others, and are not of them."""
    collections = union((begin, end) for phase, begin, end in trace.phases if phase == "gc")
    return difference(
        union((begin, end) for phase, begin, end in trace.phases if phase == name), collections
    )


def _spans(trace: RankTrace, wanted: Callable[[Event], bool]) -> Spans:
    return union(
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        for event in trace.events
        if event.get("ph") == "X" and wanted(event)
    )


def _is_kernel(event: Event) -> bool:
    return event.get("cat") in _KERNELS


def _sends(event: Event) -> bool:
    name = str(event.get("name", "")).lower()
    return "nccl" in name or name.startswith(("gloo:", "c10d::"))


def _is_update(event: Event) -> bool:
    return event.get("cat") == "gpu_user_annotation" and str(event.get("name", "")).startswith(
        "Optimizer.step"
    )


def beat_of(trace: RankTrace) -> Beat:
    """Return a profile as the beat that the rank would have written, so that the slow rank is found as in any run."""
    steps = max(1, int(trace.facts["steps"]))
    phases: dict[str, PhaseTime] = {}
    for phase in PHASES:
        spans = _phase(trace, phase) if phase != "gc" else _collections(trace)
        mean = length(spans) * 1e-6 / steps
        phases[phase] = PhaseTime(mean, mean, 0.0, 0)
    own_s = sum(one.mean_s for one in phases.values())
    facts: dict[str, Any] = dict(trace.facts)
    return Beat(
        trace.rank, str(facts["node"]), steps, 0.0, own_s, phases["data"].mean_s, 0.0, steps, phases
    )


def _collections(trace: RankTrace) -> Spans:
    return union((begin, end) for phase, begin, end in trace.phases if phase == "gc")
