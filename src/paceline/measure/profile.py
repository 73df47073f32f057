"""Profile some steps of a training on all ranks, merge the traces, and find the causes of its step time."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.launch.failure import RunFailed
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch
from paceline.measure.placement import isolated_settings
from paceline.measure.profile_shares import beat_of, shares_of
from paceline.measure.profile_verdict import ProfileVerdict, as_dict, judge
from paceline.measure.step_strip import strip_of
from paceline.measure.trace import RankTrace, merged, read_traces
from paceline.rundir import (
    STEP_FILE,
    TENSORBOARD,
    VERDICT_FILE,
    RunDir,
    make_private,
    write_whole,
    writing_to,
)
from paceline.telemetry.stragglers import find_straggler

TRACE_FILE = "trace.json.gz"


def profile(
    target: Program, ranks: int, window: tuple[int, int], arguments: Sequence[str]
) -> tuple[ProfileVerdict, Path]:
    """Train for a window of (steps skipped, steps measured); return the verdict and its folder.

    The training runs in a temporary folder: it neither resumes nor changes a run.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as scratch:
        measured = Path(scratch) / "profile"
        settings = {
            "profile.to": str(measured),
            "profile.skip": window[0],
            "profile.steps": window[1],
            **isolated_settings(Path(scratch)),
        }
        failure = launch(LaunchSpec(target, ranks, tuple(arguments), settings))
        if failure is not None:
            raise RunFailed(target.name, ranks, failure)
        traces = read_traces(measured)
        home = RunDir(_runs(arguments) / str(traces[0].facts["name"])).profile
        with writing_to(home):
            _keep(measured, make_private(home))
        return write_verdict(target.name, traces, home), home


def write_verdict(script: str, traces: Sequence[RankTrace], home: Path) -> ProfileVerdict:
    """Judge the traces of all ranks; write the merged trace and the verdict."""
    facts = traces[0].facts
    beats = [beat_of(trace) for trace in traces]
    slow = find_straggler(beats, int(facts["lanes"]), len(traces))
    verdict = judge(
        script,
        str(facts["device"]),
        int(facts["steps"]),
        [shares_of(trace) for trace in traces],
        slow,
    )
    with writing_to(home):
        write_whole(home / TRACE_FILE, gzip.compress(json.dumps(merged(traces)).encode(), 5))
        write_whole(home / VERDICT_FILE, f"{json.dumps(as_dict(verdict), indent=2)}\n".encode())
        write_whole(home / STEP_FILE, f"{json.dumps(strip_of(traces))}\n".encode())
    return verdict


def _keep(measured: Path, home: Path) -> None:
    """Copy the files of the ranks, in place of an earlier profile."""
    shutil.rmtree(home / TENSORBOARD, ignore_errors=True)
    for old in home.glob("rank-*.json"):
        old.unlink()
    make_private(home / TENSORBOARD)
    for path in [*measured.glob("rank-*.json"), *(measured / TENSORBOARD).iterdir()]:
        write_whole(home / path.relative_to(measured), path.read_bytes())


def _runs(arguments: Sequence[str]) -> Path:
    """Return the folder of runs that the arguments of a training name.

    >>> _runs(["epochs=3", "runs=/data/runs"]), _runs(["--runs", "x"]), _runs([])
    (PosixPath('/data/runs'), PosixPath('x'), PosixPath('runs'))
    """
    for number, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "runs" and (equals or number + 1 < len(arguments)):
            return Path(value if equals else arguments[number + 1])
    return Path("runs")
