"""`paceline ckpt import`: start a run from weights that another program saved."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.importing.import_run import Imported, ImportPlan, import_run
from paceline.checkpoint.importing.optimizer_state import OptimizerState
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError
from paceline.units import human_size


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Reads a Hugging Face or Accelerate folder, a safetensors file, a torch.save file or a Lightning checkpoint.

    A pickle is read by torch's restricted loader in a process of its own. What needs unrestricted unpickling is refused.
    """

    source: Path = positional(metavar="SOURCE")
    """Folder or file to import."""
    run: str = positional(metavar="RUN")
    """Folder of a run without checkpoints, such as runs/NAME, or a URL such as s3://bucket/folder/NAME."""
    step: int | None = None
    """Step of the new checkpoint, instead of the step in the file (0 without one)."""
    strip_prefix: str = "auto"
    """Prefix to remove from weight names; auto: module. and _orig_mod., in a Lightning checkpoint also model., if all names have it; none: keep all names."""
    weights: str = option("", metavar="KEY")
    """Key of the weights in a torch.save file that has others, too, such as ema or app.model (default: model, model_state_dict, state_dict, ...)."""
    weights_only: bool = False
    """Import no state of optimizers and schedulers, and start at step 0."""
    json: bool = False
    """Print the result as JSON."""


def import_checkpoint(arguments: ImportArguments) -> int:
    """Import, and print what was found and how to start the run."""
    if arguments.step is not None and arguments.step < 0:
        raise ConfigError(
            f"--step must be at least 0, got {arguments.step}", fix="for example: --step 120"
        )
    if not arguments.run:
        raise ConfigError("RUN is empty", fix="name a folder, such as runs/NAME")
    done = import_run(
        ImportPlan(
            source=arguments.source,
            run=arguments.run,
            prefix=arguments.strip_prefix,
            step=arguments.step,
            weights_only=arguments.weights_only,
            weights=arguments.weights,
        )
    )
    if arguments.json:
        print(json.dumps(_facts(done, arguments.source), indent=2))
    else:
        print("\n".join(_lines(done, arguments)))
    return 0


def _lines(done: Imported, arguments: ImportArguments) -> Iterator[str]:
    optimizer = done.optimizer
    yield f"{arguments.source} ({done.layout})"
    yield f"  -> {done.where}: {done.weights:,} weights, {human_size(done.size_bytes)}"
    if done.prefix:
        yield f"names: removed the prefix {done.prefix}"
    if arguments.weights_only:
        yield "state of optimizers and schedulers: left out, as asked by --weights-only"
    else:
        yield f"optimizer state: {_optimizer_text(optimizer)}"
        yield from _scheduler_lines(done)
    yield _step_line(done, arguments.step)
    if done.ignored:
        yield f"not imported: {', '.join(done.ignored[:12])}"
    if optimizer.learning_rate is not None:
        whose = (
            "a tracked scheduler continues from it, other scripts set their own, such as lr.base"
        )
        if not done.schedulers.states:
            whose = "the script sets its own, such as lr.base"
        yield f"learning rate in the file: {optimizer.learning_rate:g}; {whose}"
    yield ""
    yield f"paceline run SCRIPT {_settings(arguments.run)}"


def _optimizer_text(optimizer: OptimizerState) -> str:
    if optimizer.kinds:
        return ", ".join(optimizer.kinds)
    return f"left out, because {optimizer.left_out}" if optimizer.left_out else "not in the file"


def _scheduler_lines(done: Imported) -> Iterator[str]:
    schedulers = done.schedulers
    if schedulers.left_out:
        yield f"scheduler state: left out, because {schedulers.left_out}"
    elif schedulers.states:
        yield f"scheduler state: stepped {schedulers.last_epoch} times; run.track(scheduler=scheduler) restores it"
    if schedulers.last_epoch > done.step > 0 and schedulers.last_epoch % done.step == 0:
        times = schedulers.last_epoch // done.step
        yield f"warning: the scheduler was stepped {times} times per step, as Accelerate does on {times} processes; step it as often in your loop"


def _step_line(done: Imported, given: int | None) -> str:
    if done.epochs:
        return f"step: that after {done.epochs} epochs, from {done.step_key} in the file"
    if done.step_key:
        source = "" if done.step_key.startswith("the ") else " in the file"
        return f"step: {done.step}, from {done.step_key}{source}"
    if given is None and done.optimizer.kinds:
        return f"step: {done.step}; the file names none, --step N sets it"
    return f"step: {done.step}"


def _settings(run: str) -> str:
    """Return the settings of the run that starts from the import."""
    above, _, name = run.rstrip("/").rpartition("/")
    if "://" in run:
        return shlex.join([f"checkpoint.to={above}", f"name={name}"])
    folder = Path(run) if Path(run).name not in {"", ".."} else Path(run).resolve()
    name, above = folder.name, str(folder.parent)
    return shlex.join([f"name={name}"] if above == "runs" else [f"runs={above}", f"name={name}"])


def _facts(done: Imported, source: Path) -> dict[str, object]:
    return {
        "source": str(source),
        "layout": done.layout,
        "where": done.where,
        "step": done.step,
        "weights": done.weights,
        "size_bytes": done.size_bytes,
        "prefix": done.prefix,
        "optimizer_state": list(done.optimizer.kinds),
        "left_out": done.optimizer.left_out,
        "schedulers": len(done.schedulers.states),
        "epochs": done.epochs,
        "ignored": list(done.ignored),
        "learning_rate": done.optimizer.learning_rate,
    }
