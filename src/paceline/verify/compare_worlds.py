"""Run a training at several world sizes and through a resume; compare the records, and explain a difference."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.launch.failure import Failure, RunFailed
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch
from paceline.rundir import DUMP_FILE
from paceline.verify.causes import Cause
from paceline.verify.compare_rounded import compare_rounded
from paceline.verify.experiments import Experiments
from paceline.verify.records import LOSS, Record, first_difference, read_record
from paceline.verify.tensor_diff import tensor_sizes
from paceline.verify.traces import Trace, first_change, read_trace
from paceline.verify.verdict import Difference, VerifyResult

EPOCH_STEPS = 16
"""Without --steps, verify continues into the second epoch if an epoch has at most this many steps."""
STEPS = 8
"""Steps to compare if an epoch is longer."""

_FIRST = "first"
_IN_THE_MIDDLE = 0

Launch = Callable[[LaunchSpec], Failure | None]


@dataclass
class Comparison:
    """A script, and how to run it for a record."""

    target: Program
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    progress: TextIO | None
    launch: Launch = launch
    runs: int = 0
    """Experiments so far."""

    def record(self, world: int, label: str, purpose: str = "", **settings: object) -> Record:
        """Run the script at one world size and return its record."""
        if self.progress is not None:
            ranks = "1 rank" if world == 1 else f"{world} ranks"
            self.progress.write(f"running {self.target.name} on {ranks}{purpose} ...\n")
        home = self.home(world, label)
        given = {f"record.{name}": value for name, value in settings.items() if name != "runs"}
        length = {"record.steps": self.steps or STEPS}
        if not self.steps:
            length["record.epoch_steps"] = EPOCH_STEPS
        places = {"record.to": str(home), "runs": str(settings.get("runs", home / "runs"))}
        saves = {"checkpoint.every": "end", "checkpoint.to": "", "resume": "auto"}
        spec = LaunchSpec(self.target, world, self.arguments, places | length | saves | given)
        failure = self.launch(spec)
        if failure is not None:
            raise RunFailed(self.target.name, world, failure)
        return read_record(home, self.target.name)

    def trace(self, world: int, step: int, arrangement: str) -> tuple[Record, Trace | None]:
        """Run the script with a trace of one step; return its record and the trace."""
        self.runs += 1
        _use_up_process_ids(self.runs)
        label = f"{arrangement}-{self.runs}"
        purpose = f" again, to find the cause ({arrangement} lanes)"
        record = self.record(world, label, purpose, dump_step=step, arrangement=arrangement)
        if arrangement == "usual" and not self.dump(world, step).is_file():
            shutil.copy(self.home(world, label) / DUMP_FILE, self.dump(world, step))
        return record, read_trace(self.home(world, label), world)

    def resume(self, saved: int, world: int, step: int, dump_step: int = -1) -> Record:
        """Resume the run of a world size after a step, at another world size, and return the rest of its record."""
        self.runs += 1
        home = self.home(world, f"resumed-{self.runs}")
        runs = home / "runs"
        shutil.copytree(self.home(saved, _FIRST) / "runs", runs)
        for other in runs.glob("*/checkpoints/step-*"):
            if other.name != f"step-{step:09d}":
                shutil.rmtree(other)
        label, purpose = f"resumed-{self.runs}", f", resumed after step {step}"
        return self.record(world, label, purpose, runs=runs, dump_step=dump_step)

    def dump(self, world: int, step: int) -> Path:
        """Return the file with the tensors of a traced run."""
        return self.folder / f"world-{world}-step-{step}.safetensors"

    def home(self, world: int, label: str) -> Path:
        """Return the folder of one recorded run."""
        return self.folder / f"world-{world}-{label}"


def verify(
    target: Program,
    worlds: list[int],
    steps: int,
    arguments: tuple[str, ...],
    progress: TextIO | None = None,
    launch: Launch = launch,
) -> VerifyResult:
    """Run a program at each world size and through a resume, and compare all records with the first.

    `steps` = 0: to the second step of the second epoch, or 8 steps of a longer epoch.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        comparison = Comparison(target, arguments, steps, Path(folder), progress, launch)
        records = {}
        for world in worlds:
            save_step = _IN_THE_MIDDLE if world == worlds[-1] else -1
            records[world] = comparison.record(world, _FIRST, save_step=save_step)
        reference = records[worlds[0]]
        for world in worlds[1:]:
            if difference := first_difference(reference, records[world]):
                if not reference.exact:
                    rounded = compare_rounded(comparison, records)
                    return _result(comparison, records, worlds, **rounded._asdict())
                found = _explain(comparison, records, world, *difference)
                return _result(comparison, records, worlds, found)
        save_step = records[worlds[-1]].save_step
        resumed = _compare_resumed(comparison, records, worlds, save_step)
        return _result(comparison, records, worlds, resumed, resumed_after=save_step)


def _compare_resumed(
    comparison: Comparison, records: dict[int, Record], worlds: list[int], step: int
) -> Difference | None:
    """Resume the run of the last world size at the first one; return how it differs from a run without a break."""
    world, saved = worlds[0], worlds[-1]
    if step >= records[world].steps[-1].step:
        return None
    resumed = comparison.resume(saved, world, step)
    found = first_difference(records[world], resumed)
    if found is None or (not resumed.exact and found[0] > step):
        return None
    at, tensor = found
    again = comparison.resume(saved, saved, step)
    is_world = first_difference(records[saved], again) is None
    shown = [f"world sizes {', '.join(map(str, worlds))} give the same bits without a resume"]
    result = "the same bits" if is_world else "other bits"
    shown.append(f"saved after step {step} and resumed at the same world size {saved}: {result}")
    names = [tensor]
    if at > step:
        names = _first_names(comparison, (saved, world), step, at) or names
    shown.append(f"first difference after the resume: {names[0]}")
    cause = Cause("resume", "world" if is_world else "unsaved", names, shown)
    return Difference(world, at, tensor, math.nan, math.nan, cause, resumed_after=step)


def _first_names(comparison: Comparison, worlds: tuple[int, int], step: int, at: int) -> list[str]:
    """Return what differs first in a step of a resumed run."""
    saved, world = worlds
    _, usual = comparison.trace(world, at, "usual")
    comparison.resume(saved, world, step, dump_step=at)
    trace = read_trace(comparison.home(world, f"resumed-{comparison.runs}"), world)
    change = first_change(usual, trace) if usual and trace else None
    return [f"the {change.where} of {name}" for name in change.names] if change else []


def _result(
    comparison: Comparison,
    records: dict[int, Record],
    worlds: list[int],
    difference: Difference | None,
    resumed_after: int = 0,
    **more: Any,
) -> VerifyResult:
    last = records[worlds[0]].steps[-1]
    return VerifyResult(
        same=difference is None,
        script=comparison.target.name,
        worlds=worlds,
        steps=last.step,
        tensors=len(records[worlds[0]].weights),
        metrics=len({name for line in records[worlds[0]].steps for name in line.metrics}),
        resumed_after=resumed_after if resumed_after < last.step else 0,
        digests={world: record.digest for world, record in records.items()},
        difference=difference,
        **more,
    )


def _explain(
    comparison: Comparison, records: dict[int, Record], world: int, step: int, tensor: str
) -> Difference:
    """Run experiments for the cause; measure the difference."""
    reference = next(iter(records))
    cause = Experiments(comparison, records, world, step).find(tensor)
    if tensor == LOSS:
        largest, relative = _loss_difference(records[reference], records[world], step)
    else:
        sizes = {}
        files = comparison.dump(reference, step), comparison.dump(world, step)
        if all(file.is_file() for file in files):
            sizes = tensor_sizes(*files)
        largest, relative = sizes.get(tensor) or max(sizes.values(), default=(math.nan, math.nan))
    return Difference(world, step, tensor, largest, relative, cause)


def _loss_difference(reference: Record, other: Record, step: int) -> tuple[float, float]:
    expected, actual = reference.step(step).loss, other.step(step).loss
    absolute = abs(expected - actual)
    return absolute, absolute / max(abs(expected), 1e-30)


def _use_up_process_ids(count: int) -> None:
    """Let the next run have process ids at another distance: a script that depends on them must not repeat itself."""
    for _ in range(count):
        subprocess.run([sys.executable, "-S", "-c", ""], check=False)
