"""What a rank writes down of itself: where it is, what it waits for, and how it ended. JSON, a file a rank."""

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
from paceline.hang.links import Links, own_links
from paceline.hang.process import GONE, Process, again, children, process
from paceline.hang.stacks import CodeLine, Stack, own_stacks, telling_place
from paceline.rundir import RunDir, make_private, write_whole
from paceline.telemetry.pulse import Pulse
from paceline.world.world import World

State = Literal["running", "moving", "stuck", "failed", "left"]


@dataclass(frozen=True)
class RankException:
    """The exception with which a rank ended."""

    what: str
    text: str
    """Its traceback, from the user's first line on."""
    lost_peer: bool
    """Whether it only says that another rank is gone."""


@dataclass(frozen=True)
class RankReport:
    """A rank, as it saw itself."""

    rank: int
    size: int
    node: str
    state: State
    """running: it has begun, and written nothing since; moving: another is stuck, this one is not."""
    time_s: float
    step: int
    doing: str
    """starting, reading, step, evaluating, saving or ending."""
    quiet_s: float = 0.0
    usual_s: float = 0.0
    process: Process = field(default_factory=lambda: Process(0, 0, ""))
    children: tuple[Process, ...] = ()
    stacks: tuple[Stack, ...] = ()
    collectives: tuple[Collective, ...] = ()
    wrong: RankException | None = None
    links: Links = field(default_factory=Links)
    """With other hosts."""
    crash: str = ""
    """How native code ended it; the stacks are then those of its end."""

    @property
    def place(self) -> CodeLine | None:
        """Where it is."""
        return telling_place(self.stacks)


def current_report(
    world: World, pulse: Pulse, state: State, wrong: RankException | None = None
) -> RankReport:
    """Return this rank as it is now; what takes time to find is left out where nothing is wrong."""
    pid, told = os.getpid(), state in {"stuck", "failed"}
    return RankReport(
        world.rank, world.size, socket.gethostname(), state, time.time(), pulse.step, pulse.doing,
        round(pulse.quiet_s, 3), round(pulse.usual_s, 6), process(pid),
        tuple(children(pid)) if told else (),
        tuple(own_stacks()) if told else (),
        _collectives(wrong) if told else (),
        wrong, own_links(),
    )  # fmt: skip


def _collectives(wrong: RankException | None) -> tuple[Collective, ...]:
    """Return the last ones; torch counts one that failed as done, and it is not."""
    found = last_collectives()
    if found and wrong and (wrong.lost_peer or "gloo" in wrong.text):
        found[-1] = replace(found[-1], done=False)
    return tuple(found)


def write_report(directory: RunDir, record: RankReport) -> None:
    """Write a record, whole; a disk that hangs is one of the things it tells of, so it is not waited for."""
    path = directory.hang_record(record.rank)
    make_private(path.parent)
    write_whole(path, f"{json.dumps(asdict(record))}\n".encode(), durable=False)


def read_report(path: Path) -> RankReport | None:
    """Return a record; nothing for what is none."""
    try:
        return parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_reports(directory: RunDir) -> list[RankReport]:
    """Return the records of the last start of a run; those of a larger world before it say nothing."""
    paths = sorted(directory.hang_record(0).parent.glob("[0-9]*.json"))
    found = [record for record in map(read_report, paths) if record]
    size = max(found, key=lambda record: record.time_s).size if found else 0
    return [_with_crash(directory, looked_at(record)) for record in found if record.rank < size]


def _with_crash(directory: RunDir, record: RankReport) -> RankReport:
    """Return a record with how native code ended its rank, if it did: such a rank writes no record any more."""
    alive = record.node == socket.gethostname() and record.process.state not in {GONE, "Z"}
    crash = (
        None
        if alive or record.state in {"failed", "left"}
        else read_crash(directory.crash(record.rank))
    )
    if crash is None:
        return record
    return replace(
        record, process=replace(record.process, state=GONE), crash=crash.what, stacks=crash.stacks
    )


def looked_at(record: RankReport) -> RankReport:
    """Return a record with its process as it stands now, if that is on this machine."""
    if record.node != socket.gethostname() or not record.process.pid:
        return record
    return replace(record, process=again(record.process))


def parsed(facts: Mapping[str, Any]) -> RankReport:
    """Return what JSON says."""
    wrong = facts.get("wrong")
    own = {
        "process": Process(**facts["process"]),
        "children": tuple(Process(**child) for child in facts["children"]),
        "stacks": tuple(_stack(stack) for stack in facts["stacks"]),
        "collectives": tuple(_collective(entry) for entry in facts["collectives"]),
        "wrong": RankException(**wrong) if wrong else None,
        "links": Links(**{name: tuple(found) for name, found in facts.get("links", {}).items()}),
    }
    return RankReport(**{**facts, **own})


def _stack(facts: Mapping[str, Any]) -> Stack:
    return Stack(str(facts["thread"]), tuple(CodeLine(**place) for place in facts["places"]))


def _collective(facts: Mapping[str, Any]) -> Collective:
    return Collective(
        **{
            **facts,
            "sizes": tuple(tuple(s) for s in facts["sizes"]),
            "types": tuple(facts["types"]),
        }
    )
