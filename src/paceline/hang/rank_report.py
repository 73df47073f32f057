"""The report of a rank about itself: where it is, what it waits for, how it ended. One JSON file per rank."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.hang.crash import read_crash
from paceline.hang.flight_recorder import Collective, last_collectives
from paceline.hang.proc import GONE, Links, Process, children, own_links, process, refresh
from paceline.hang.stacks import CodeLine, Stack, main_place, own_stacks
from paceline.rundir import RunDir, make_private, write_whole
from paceline.safe_open import read_json
from paceline.telemetry.pulse import Pulse
from paceline.world.world import World

_LARGEST_BYTES = 1 << 24

DEBUGGED = "held in a debugger"
WAITS_FOR_DEBUGGER = "waiting for the debugger of another rank"

State = Literal["running", "moving", "held", "stuck", "failed", "left"]


@dataclass(frozen=True)
class RankException:
    """The exception that ended a rank."""

    what: str
    text: str
    """Its traceback, from the first frame of user code on."""
    lost_peer: bool
    """Whether it only says that another rank is gone."""


@dataclass(frozen=True)
class RankReport:
    """State of a rank, as reported by the rank itself."""

    rank: int
    size: int
    node: str
    state: State
    """running: started, no report since; moving: makes progress while another rank is stuck; held: by a debugger;
    left: finished."""
    time_s: float
    step: int
    doing: str
    """starting, reading, step, evaluating, saving, ending, DEBUGGED or WAITS_FOR_DEBUGGER."""
    quiet_s: float = 0.0
    usual_s: float = 0.0
    process: Process = field(default_factory=lambda: Process(0, 0, ""))
    children: tuple[Process, ...] = ()
    stacks: tuple[Stack, ...] = ()
    collectives: tuple[Collective, ...] = ()
    wrong: RankException | None = None
    links: Links = field(default_factory=Links)
    """TCP connections to other hosts."""
    crash: str = ""
    """The crash in native code that ended it; the stacks are then those of that moment."""
    unusual: str = ""
    """What the script did in its last unusual step: "called run.finish (train.py:27) in step 4"."""

    @property
    def place(self) -> CodeLine | None:
        """The line of code that explains most."""
        return main_place(self.stacks)

    @property
    def where(self) -> str:
        """That line, and the line of the user's code that called it."""
        text = str(self.place or "")
        for stack in self.stacks:
            own = [place for place in stack.places if place.kind == "user"]
            if own and self.place in stack.places and self.place not in own:
                return f"{text}, called in {own[-1]}"
        return text


def current_report(
    world: World, pulse: Pulse, state: State, wrong: RankException | None = None
) -> RankReport:
    """Return the report of this rank; slow parts (stacks, collectives) only if something is wrong."""
    pid = os.getpid()
    report = RankReport(
        rank=world.rank,
        size=world.size,
        node=socket.gethostname(),
        state=state,
        time_s=time.time(),
        step=pulse.step,
        doing=pulse.doing,
        quiet_s=round(pulse.quiet_s, 3),
        usual_s=round(pulse.usual_s, 6),
        process=process(pid),
        wrong=wrong,
        links=own_links(),
        unusual=pulse.unusual,
    )
    if state not in {"stuck", "failed"}:
        return report
    return replace(
        report,
        children=tuple(children(pid)),
        stacks=tuple(own_stacks()),
        collectives=_collectives(wrong),
    )


def _collectives(wrong: RankException | None) -> tuple[Collective, ...]:
    """Return the newest collectives; torch marks a failed one as completed, which is corrected here."""
    entries = last_collectives()
    if entries and wrong and (wrong.lost_peer or "gloo" in wrong.text):
        entries[-1] = replace(entries[-1], done=False)
    return tuple(entries)


def write_report(directory: RunDir, report: RankReport) -> None:
    """Replace the report file of a rank, without waiting for the disk: a blocked disk is one cause of hangs."""
    path = directory.hang_record(report.rank)
    make_private(path.parent)
    write_whole(path, f"{json.dumps(asdict(report))}\n".encode(), durable=False)


def read_report(path: Path) -> RankReport | None:
    """Return the report in a file; None if it is missing or damaged."""
    try:
        return parse_report(read_json(path, _LARGEST_BYTES))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_reports(directory: RunDir) -> list[RankReport]:
    """Return the reports of the last launch of a run; leftover reports of an earlier, larger world are ignored."""
    paths = sorted(directory.hang_record(0).parent.glob("[0-9]*.json"))
    reports = [report for report in map(read_report, paths) if report]
    if not reports:
        return []
    size = max(reports, key=lambda report: report.time_s).size
    current = [report for report in reports if report.rank < size]
    return [_with_crash(directory, _refreshed(report)) for report in current]


def _with_crash(directory: RunDir, report: RankReport) -> RankReport:
    """Add a crash in native code to a report: the crashed rank could not write one."""
    alive = report.node == socket.gethostname() and report.process.state not in {GONE, "Z"}
    if alive or report.state in {"failed", "left"}:
        return report
    crash = read_crash(directory.crash(report.rank))
    if crash is None:
        return report
    gone = replace(report.process, state=GONE)
    return replace(report, process=gone, crash=crash.what, stacks=crash.stacks)


def _refreshed(report: RankReport) -> RankReport:
    """Update the state of the process, if it runs on this machine."""
    if report.node != socket.gethostname() or not report.process.pid:
        return report
    return replace(report, process=refresh(report.process))


def parse_report(facts: Mapping[str, Any]) -> RankReport:
    """Convert a report from JSON."""
    wrong = facts.get("wrong")
    links = {name: tuple(addresses) for name, addresses in facts.get("links", {}).items()}
    nested = {
        "process": Process(**facts["process"]),
        "children": tuple(Process(**child) for child in facts["children"]),
        "stacks": tuple(map(parse_stack, facts["stacks"])),
        "collectives": tuple(map(parse_collective, facts["collectives"])),
        "wrong": RankException(**wrong) if wrong else None,
        "links": Links(**links),
    }
    return RankReport(**{**facts, **nested})


def parse_stack(facts: Mapping[str, Any]) -> Stack:
    """Convert a stack from JSON."""
    return Stack(str(facts["thread"]), tuple(CodeLine(**place) for place in facts["places"]))


def parse_collective(facts: Mapping[str, Any]) -> Collective:
    """Convert a collective from JSON."""
    sizes = tuple(tuple(shape) for shape in facts["sizes"])
    return Collective(**{**facts, "sizes": sizes, "types": tuple(facts["types"])})
