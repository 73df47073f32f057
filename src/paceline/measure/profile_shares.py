"""The time of a step on a rank, divided into five kinds by its trace and its phases."""

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
    """Seconds per step of one rank; their sum is the step time."""

    compute: float
    """Forward and backward: in torch operators on a CPU, in kernels on a GPU."""
    exposed_communication: float
    """Communication, or waiting for other ranks, that no computation hides."""
    data_wait: float
    """Waiting for samples."""
    optimizer: float
    """Updating the weights."""
    host_gaps: float
    """The rest: Python between operators, garbage collection, logs, checkpoints; on a GPU, kernels launched late."""

    @property
    def step_s(self) -> float:
        """The step time."""
        return float(sum(asdict(self).values()))


def shares_of(trace: RankTrace) -> Shares:
    """Return the time per step of a rank within its window."""
    window = [(trace.begin, trace.end)]
    on_gpu = any(_is_kernel(event) for event in trace.events)
    parts = _on_gpu(trace, window) if on_gpu else _on_cpu(trace, window)
    scale = 1e-6 / max(1, int(trace.facts["steps"]))
    compute, wait, data, update = (length(spans) * scale for spans in parts)
    rest = max(0.0, length(window) * scale - compute - wait - data - update)
    return Shares(compute, wait, data, update, rest)


def _on_cpu(trace: RankTrace, window: Spans) -> tuple[Spans, Spans, Spans, Spans]:
    work = union([*_phase(trace, "forward"), *_phase(trace, "backward")])
    wait = _phase(trace, "wait")
    if work:
        work = intersection(work, _spans(trace, lambda event: event.get("cat") == "cpu_op"))
    else:  # FSDP communicates within forward and backward
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
    wait = intersection(idle, _phase(trace, "wait")) if not sending else []  # gloo runs no kernels
    return (
        difference(working, updating),
        union([*difference(sending, working), *wait]),
        data,
        updating,
    )


def _phase(trace: RankTrace, name: str) -> Spans:
    """Return when a rank was in a phase, without the garbage collections within it."""
    collections = _collections(trace)
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
    """Return a profile as a heartbeat, so that stragglers are found as in any run."""
    steps = max(1, int(trace.facts["steps"]))
    phases: dict[str, PhaseTime] = {}
    for phase in PHASES:
        spans = _phase(trace, phase) if phase != "gc" else _collections(trace)
        mean = length(spans) * 1e-6 / steps
        phases[phase] = PhaseTime(mean, mean, 0.0, 0)
    own_s = sum(phase.mean_s for phase in phases.values())
    facts: dict[str, Any] = dict(trace.facts)
    return Beat(
        trace.rank, str(facts["node"]), steps, 0.0, own_s, phases["data"].mean_s, 0.0, steps, phases
    )


def _collections(trace: RankTrace) -> Spans:
    return union((begin, end) for phase, begin, end in trace.phases if phase == "gc")
