"""`paceline ckpt`: list, check and export the checkpoints of a run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.catalog import SAVE_FIRST, Catalog, Entry, list_entries, verify_entry
from paceline.checkpoint.export import Exported, export_newest
from paceline.checkpoint.find import find_catalog, located
from paceline.checkpoint.retention import best_step
from paceline.cli.named_run import newest_run
from paceline.config.arguments import option, positional
from paceline.errors import ConfigError, PacelineError
from paceline.terminal import plain
from paceline.units import human_size

_LAYOUTS = {
    "safetensors": "from safetensors.torch import load_file\nweights = load_file({path})\nmodel.load_state_dict(weights)",
    "gpt2": "from transformers import GPT2LMHeadModel\nmodel = GPT2LMHeadModel.from_pretrained({path})",
}
_TOKENIZER = (
    "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained({path})"
)
_MOST_PROBLEMS = 3
_LONGEST_CELL = 8
_BESIDE = {
    "aside": "set aside",
    "leftover": "left by an interrupted or running save or deletion",
}


@dataclass(frozen=True, kw_only=True)
class CheckpointArguments:
    """Arguments of every action on checkpoints."""

    run: str = positional("", metavar="RUN")
    """Name or folder of a run, a folder of checkpoints, one checkpoint, or a URL such as s3://bucket/folder/NAME (default: the run that was started last)."""
    runs: str = option("runs", metavar="FOLDER")
    """Folder of all runs."""
    step: int | None = None
    """Only the checkpoint of this step."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ListArguments(CheckpointArguments):
    """Shows step, samples, size, ranks and metrics of each checkpoint, without reading the tensors."""


@dataclass(frozen=True, kw_only=True)
class CheckArguments(CheckpointArguments):
    """Reads every byte and compares it with the checksums of the manifest."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments(CheckpointArguments):
    """Exports the newest intact checkpoint, unless --step names another one."""

    out: Path | None = positional(None, metavar="OUT", needed=True)
    """File to write, such as model.safetensors; with --as gpt2: folder to write."""
    layout: Literal["safetensors", "gpt2"] = option("safetensors", "--as")
    """safetensors: one file with the model's own tensor names; gpt2: a folder for Hugging Face transformers, from a run of the gpt recipe."""
    force: bool = False
    """Overwrite an existing file."""


def _find(arguments: CheckpointArguments) -> Catalog:
    if arguments.step is not None and arguments.step < 0:
        raise ConfigError(
            f"--step must be at least 0, got {arguments.step}", fix="for example: --step 120"
        )
    catalog = find_catalog(_run(arguments))
    return catalog if arguments.step is None else catalog.narrowed(arguments.step)


def _run(arguments: CheckpointArguments) -> str:
    """Return the path or address of the run that was named, or else of the newest run."""
    return located(arguments.run or newest_run(arguments.runs), Path(arguments.runs))


def list_checkpoints(arguments: ListArguments) -> int:
    """Print a table of the checkpoints; return 1 if there are none."""
    catalog = _find(arguments)
    everything, beside = list_entries(catalog.storage)
    marks = _marks(catalog, everything)
    entries = [entry for entry in everything if catalog.only in {None, entry.step}]
    beside = [] if entries and catalog.only is not None else beside
    last = catalog.final()
    final = list_entries(last.storage)[0][-1] if last is not None else None
    if arguments.json:
        found = [_facts(entry) | {"marks": marks[entry.step]} for entry in entries]
        _print_json(
            {
                "where": catalog.where,
                "checkpoints": found,
                "final": _facts(final) if final else None,
                "beside": [item._asdict() for item in beside],
            }
        )
    else:
        print(catalog.where)
        print("\n".join(_table(entries, marks)) if entries else "there are no checkpoints here")
        if final is not None:
            print(
                f"changed after the loop: {final.where} ({human_size(final.manifest.size_bytes) if final.manifest else '?'})  {_verdict(final)}"
            )
        for item in beside:
            print(f"{_BESIDE[item.kind]}: {item.name} ({human_size(item.size_bytes)})")
    return 0 if entries else 1


def check_checkpoints(arguments: CheckArguments) -> int:
    """Verify every byte, and print each result as soon as it is known."""
    catalog = _find(arguments)
    found: list[Entry] = []
    final = catalog.final()
    places = [(catalog.storage, step) for step in catalog.steps()]
    places += [(final.storage, step) for step in final.steps()] if final is not None else []
    for storage, step in places:
        if entry := verify_entry(storage, step):
            found.append(entry)
            if not arguments.json:
                size = f" ({human_size(entry.manifest.size_bytes)})" if entry.manifest else ""
                print(f"{entry.where}{size}  {_verdict(entry)}", flush=True)
    good = [entry for entry in found if entry.verdict == "ok"]
    if arguments.json:
        _print_json({"where": catalog.where, "checkpoints": [_facts(entry) for entry in found]})
    elif not found:
        raise PacelineError(f"there are no checkpoints in {catalog.where}", fix=SAVE_FIRST)
    return 0 if found and len(good) == len(found) else 1


def export_checkpoint(arguments: ExportArguments) -> int:
    """Export the weights, and print the code that loads them."""
    arguments, out = _with_run(arguments)
    exported = _export(_find(arguments), arguments, out)
    if arguments.json:
        _print_json(exported._asdict() | {"path": str(out)})
        return 0
    for problem in exported.passed_over:
        print(f"skipped: {problem}", file=sys.stderr)
    size = human_size(exported.size_bytes)
    print(f"{exported.where}\n  -> {out}: {exported.tensors:,} tensors, {size}\n")
    path = json.dumps(str(out), ensure_ascii=False)
    print(_LAYOUTS[arguments.layout].format(path=path))
    if (out / "tokenizer.json").is_file():
        print(_TOKENIZER.format(path=path))
    return 0


def _with_run(arguments: ExportArguments) -> tuple[ExportArguments, Path]:
    """Return the arguments with the run, and OUT: a single word that is not a folder or an address is OUT."""
    run, out = arguments.run, arguments.out
    if out is None:
        is_run = not run or "://" in run or Path(located(run, Path(arguments.runs))).is_dir()
        if is_run:
            usage = "paceline ckpt export [RUN] OUT [options]"
            raise ConfigError("OUT is missing", fix=usage)
        run, out = "", Path(run)
    return replace(arguments, run=run or newest_run(arguments.runs), out=out), out


def _export(catalog: Catalog, arguments: ExportArguments, out: Path) -> Exported:
    if arguments.layout == "safetensors":
        return export_newest(catalog, out, force=arguments.force)
    if arguments.force:
        raise ConfigError(
            "--force does not apply to --as gpt2, which writes a new folder", fix="remove --force"
        )
    from paceline.recipes.gpt_export import export_gpt2

    return export_gpt2(catalog, _run(arguments), out)


def _marks(catalog: Catalog, entries: Sequence[Entry]) -> dict[int, list[str]]:
    """Return the marks of each step: newest, best by the metric of checkpoint.best, imported."""
    manifests = {entry.step: entry.manifest for entry in entries if entry.manifest}
    last = manifests[max(manifests)].config if manifests else {}
    rule = catalog.best or str(last.get("checkpoint.best", ""))
    best = None
    if rule:
        best = best_step({step: manifest.metrics for step, manifest in manifests.items()}, rule)
    newest = max((entry.step for entry in entries), default=None)
    marks: dict[int, list[str]] = {entry.step: [] for entry in entries}
    for mark, step in (("newest", newest), ("best", best)):
        if step is not None:
            marks[step].append(mark)
    for step, manifest in manifests.items():
        if "imported" in manifest.values:
            marks[step].append("imported")
    return marks


def _table(entries: Sequence[Entry], marks: Mapping[int, Sequence[str]]) -> list[str]:
    rows = [["step", "samples", "size", "ranks", "metrics", "verdict"]]
    rows += [[plain(cell) for cell in _row(entry, marks[entry.step])] for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:4], widths[:4], strict=True)]
        lines.append("  ".join([*numbers, row[4].ljust(widths[4]), row[5]]))
    return lines


def _row(entry: Entry, marks: Sequence[str]) -> list[str]:
    verdict = _verdict(entry) + (f" ({', '.join(marks)})" if marks else "")
    if entry.manifest is None:
        return [str(entry.step), "?", "?", "?", "", verdict]
    facts = entry.manifest
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in sorted(facts.metrics.items()))
    ranks = f"{facts.values.get('world_size', '?')}"[:_LONGEST_CELL]
    return [
        str(entry.step),
        f"{facts.samples:,}",
        human_size(facts.size_bytes),
        ranks,
        metrics,
        verdict,
    ]


def _facts(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    metrics = {}
    for name, value in (manifest.metrics if manifest else {}).items():
        metrics[name] = value if math.isfinite(value) else None
    return {
        "step": entry.step,
        "where": entry.where,
        "verdict": entry.verdict,
        "problems": list(entry.problems),
        "samples": manifest.samples if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "ranks": manifest.values.get("world_size") if manifest else None,
        "metrics": metrics,
    }


def _verdict(entry: Entry) -> str:
    problems = list(entry.problems[:_MOST_PROBLEMS])
    more = len(entry.problems) - _MOST_PROBLEMS
    if more > 0:
        problems.append(f"and {more} more")
    return f"{entry.verdict}: {'; '.join(problems)}" if problems else entry.verdict


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2))
