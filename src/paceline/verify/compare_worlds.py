"""Run a training at several world sizes and through a resume; compare the records, and explain a difference."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from paceline.launch.failure import Failure, RunFailed
from paceline.launch.spec import LaunchSpec, Program
from paceline.launch.supervisor import launch
from paceline.verified import remember
from paceline.verify.causes import Cause
from paceline.verify.compare_rounded import compare_rounded
from paceline.verify.experiments import Experiments
from paceline.verify.records import LOSS, Record, first_difference, read_record
from paceline.verify.tensor_diff import DUMP_FILE, tensor_sizes
from paceline.verify.traces import Trace, first_change, read_trace
from paceline.verify.verdict import (
    Difference,
    VerifyResult,
    describe_begin,
    describe_difference,
    describe_digest,
    describe_end,
    describe_run,
)

EPOCH_STEPS = 4
"""Without --steps, verify cuts longer epochs to this many steps, and compares up to the first step of the third."""
STEPS = 8
"""The fewest steps to compare, and those of a run that ends within its first epoch."""

_FIRST = "first"
_WITHIN_SECOND_EPOCH = 0
_WORKERS = 2
"""Worker processes of the resumed run, if the script uses none."""

Launch = Callable[[LaunchSpec], Failure | None]
Show = Callable[[str], None]


@dataclass
class Comparison:
    """A script, and how to run it for a record."""

    target: Program
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    progress: TextIO | None
    launch: Launch = launch
    most_ranks: int = 0
    """The largest world: all runs have enough lanes for it, unless the script or the command gives a number."""
    runs: int = 0
    """Experiments so far."""

    def record(self, world: int, label: str, purpose: str = "", **settings: object) -> Record:
        """Run the script at one world size and return its record."""
        if self.progress is not None:
            ranks = "1 rank" if world == 1 else f"{world} ranks"
            self.progress.write(f"running {self.target.name} on {ranks}{purpose} ...\n")
        home = self.home(world, label)
        given = {name: value for name, value in settings.items() if "." in name}
        length = {"record.steps": self.steps or STEPS, "record.ends_script": True}
        if not self.steps:
            length["record.epoch_steps"] = EPOCH_STEPS
        places = {"record.to": str(home), "runs": str(settings.get("runs", home / "runs"))}
        saves = {"checkpoint.every": "end", "checkpoint.to": "", "resume": "auto"}
        every = places | length | saves | given
        spec = LaunchSpec(self.target, world, self.arguments, every, most_ranks=self.most_ranks)
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
        traced = {"record.dump_step": step, "record.arrangement": arrangement}
        record = self.record(world, label, purpose, **traced)
        if arrangement == "usual" and not self.dump(world, step).is_file():
            shutil.copy(self.home(world, label) / DUMP_FILE, self.dump(world, step))
        return record, read_trace(self.home(world, label), world)

    def resume(self, saved: int, world: int, step: int, **settings: object) -> Record:
        """Resume the run of a world size after a step, at another world size, and return the rest of its record."""
        self.runs += 1
        home = self.home(world, f"resumed-{self.runs}")
        runs = home / "runs"
        shutil.copytree(self.home(saved, _FIRST) / "runs", runs)
        for other in runs.glob("*/checkpoints/step-*"):
            if other.name != f"step-{step:09d}":
                shutil.rmtree(other)
        label, purpose = f"resumed-{self.runs}", f", resumed after step {step}"
        if workers := settings.get("read.workers"):
            purpose += f" with read.workers={workers}"
        return self.record(world, label, purpose, runs=runs, **settings)

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
    show: Show = lambda _: None,
) -> VerifyResult:
    """Run a program at each world size and through a resume, and compare all records with the first.

    `steps` = 0: to the first step of the third epoch, with long epochs cut; or 8 steps of a run of one epoch. `show` is
    called with every part of `describe(result)` as soon as it is known. A difference ends the comparison; then its
    cause is looked for.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        comparison = Comparison(
            target, arguments, steps, Path(folder), progress, launch, most_ranks=max(worlds)
        )
        result = _compare(comparison, worlds, show)
        if result.same and not result.tolerance:
            remember(comparison.home(worlds[0], _FIRST), worlds)
        show(describe_end(result))
        return result


def _compare(comparison: Comparison, worlds: list[int], show: Show) -> VerifyResult:
    records: dict[int, Record] = {}
    reference = worlds[0]
    for world in worlds:
        save_step = _WITHIN_SECOND_EPOCH if world == worlds[-1] else -1
        settings: dict[str, Any] = {"record.save_step": save_step}
        records[world] = comparison.record(world, _FIRST, **settings)
        if not records[reference].exact:
            continue
        if world == reference:
            show(describe_run(_result(comparison, records)))
        show(describe_digest(world, records[world].digest))
        if difference := first_difference(records[reference], records[world]):
            result = _result(comparison, records, Difference(world, *difference))
            show(describe_difference(result))
            found = _explain(comparison, records, world, *difference)
            return replace(result, difference=found)
    if not records[reference].exact:
        result = _compare_inexact(comparison, records)
        show(describe_begin(result))
        if result.difference:
            show(describe_difference(result))
        return result
    return _compare_resumed(comparison, records, show)


def _compare_inexact(comparison: Comparison, records: dict[int, Record]) -> VerifyResult:
    reference, *others = records.values()
    if any(first_difference(reference, record) for record in others):
        rounded = compare_rounded(comparison, records)._asdict()
        return replace(_result(comparison, records), **rounded, same=not rounded["difference"])
    return _compare_resumed(comparison, records, lambda _: None)


def _compare_resumed(
    comparison: Comparison, records: dict[int, Record], show: Show
) -> VerifyResult:
    """Resume the run of the last world size at the first one, and compare the rest with a run without a break.

    Worker processes read the data meanwhile, if they can and the script has none. Only if the rest differs, or the
    workers fail, another resume without them tells the two experiments apart.
    """
    (world, reference), *_, (saved, last) = records.items()
    step = last.save_step
    if step >= reference.steps[-1].step:
        return _result(comparison, records)
    more: dict[str, object] = {} if reference.workers else {"read.workers": _WORKERS}
    failure = ""
    try:
        resumed = comparison.resume(saved, world, step, **more)
    except RunFailed as error:
        if not more or error.on_request:
            raise
        resumed, failure, more = comparison.resume(saved, world, step), error.cause, {}
    found = _difference_after(reference, resumed, step)
    by_workers = False
    if found and more:
        again = comparison.resume(saved, world, step)
        by_workers = _difference_after(reference, again, step) is None
        if not by_workers:
            resumed, more = again, {}
            found = _difference_after(reference, again, step)
    result = _result(comparison, records)
    result = replace(
        result, resumed_after=step, workers=_WORKERS if more else 0, workers_failed=failure
    )
    if found is None:
        return result
    at, tensor = found
    difference = Difference(world, at, tensor, resumed_after=step)
    result = replace(result, same=False, difference=difference)
    show(describe_difference(result))
    if by_workers:
        shown = ["a resume without worker processes gives the same bits as a run without a break"]
        cause = Cause("samples", "workers", [], shown)
    else:
        cause = _cause_of_resume(comparison, records, step, found)
    return replace(result, difference=replace(difference, cause=cause))


def _difference_after(reference: Record, resumed: Record, step: int) -> tuple[int, str] | None:
    """Return how a resumed run differs; without `exact`, only in what it restores."""
    found = first_difference(reference, resumed)
    return found if found and (resumed.exact or found[0] == step) else None


def _cause_of_resume(
    comparison: Comparison, records: dict[int, Record], step: int, found: tuple[int, str]
) -> Cause:
    world, saved = next(iter(records)), list(records)[-1]
    at, tensor = found
    again = comparison.resume(saved, saved, step)
    is_world = first_difference(records[saved], again) is None
    shown = [f"world sizes {', '.join(map(str, records))} give the same bits without a resume"]
    bits = "the same bits" if is_world else "other bits"
    shown.append(f"saved after step {step} and resumed at the same world size {saved}: {bits}")
    names = [tensor]
    if at > step:
        names = _first_names(comparison, (saved, world), step, at) or names
    shown.append(f"first difference after the resume: {names[0]}")
    return Cause("resume", "world" if is_world else "unsaved", names, shown)


def _first_names(comparison: Comparison, worlds: tuple[int, int], step: int, at: int) -> list[str]:
    """Return what differs first in a step of a resumed run."""
    saved, world = worlds
    _, usual = comparison.trace(world, at, "usual")
    traced = {"record.dump_step": at}
    comparison.resume(saved, world, step, **traced)
    trace = read_trace(comparison.home(world, f"resumed-{comparison.runs}"), world)
    change = first_change(usual, trace) if usual and trace else None
    return list(map(change.describe, change.names)) if change else []


def _result(
    comparison: Comparison, records: dict[int, Record], difference: Difference | None = None
) -> VerifyResult:
    reference = next(iter(records.values()))
    return VerifyResult(
        same=difference is None,
        script=comparison.target.name,
        worlds=list(records),
        steps=reference.steps[-1].step,
        tensors=len(reference.weights),
        metrics=len({name for line in reference.steps for name in line.metrics}),
        digests={world: record.digest for world, record in records.items()},
        epoch_steps=reference.epoch_steps,
        difference=difference,
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
