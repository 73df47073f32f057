"""Look at a run's checkpoints, read every byte of them, or export the weights: list RUN, check RUN, export RUN OUT."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.catalog import SAVE_FIRST, Catalog, Entry, list_entries, verify_entry
from paceline.checkpoint.export import Exported, export_newest
from paceline.checkpoint.find import find_catalog, runs_in
from paceline.checkpoint.retention import best_step
from paceline.errors import ConfigError, PacelineError, did_you_mean
from paceline.units import human_size

HELP = "checkpoints of a run: list them, check every byte, export the weights"

_FORMS = {"list": "list RUN", "check": "check RUN", "export": "export RUN OUT.safetensors"}
_GPT2 = "export RUN --as gpt2 FOLDER"
_LAYOUTS = {
    "safetensors": "from safetensors.torch import load_file\nweights = load_file({path})\nmodel.load_state_dict(weights)",
    "gpt2": "from transformers import GPT2LMHeadModel\nmodel = GPT2LMHeadModel.from_pretrained({path})",
}
_TOKENIZER = (
    "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained({path})"
)
_OPTIONS = ("--as", "--step", "--json", "--force")
_SHOWN = 3  # problems of one checkpoint
_BESIDE = {
    "aside": "set aside",
    "leftover": "left by a save or a deletion that was interrupted, or is under way",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    where = "a run's folder, a folder of checkpoints, one checkpoint, or an address such as s3://bucket/folder/NAME"
    parser.add_argument(
        "action", nargs="?", metavar="list|check|export", help="; ".join([*_FORMS.values(), _GPT2])
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=where)
    parser.add_argument(
        "out",
        nargs="?",
        metavar="OUT",
        help="export: the file to write, or the folder with --as gpt2",
    )
    parser.add_argument(
        "--as",
        dest="layout",
        default="safetensors",
        metavar="LAYOUT",
        help="export: safetensors (one file, our names: the default), or gpt2: the folder that Hugging Face's transformers "
        "load, of a run of the gpt recipe",
    )
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N",
        help="only this step; without it, export takes the newest good one",
    )
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument(
        "--force", action="store_true", help="export: write over a file that exists"
    )


def main(known: argparse.Namespace) -> int:
    """List, check or export."""
    words = [
        word for word in (known.action, known.run, known.out) if word is not None
    ] + known.arguments
    action = _action(words, _FORMS | ({"export": _GPT2} if known.layout == "gpt2" else {}))
    catalog = find_catalog(words[1])
    if known.step is not None:
        catalog = catalog.narrowed(known.step)
    if action == "export":
        return _export(catalog, words[1], Path(words[2]), known)
    return (
        _list(catalog, as_json=known.json)
        if action == "list"
        else _check(catalog, as_json=known.json)
    )


def _step(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--step {text!r} is not a step", fix="give its number, as in --step 120")
    return int(text)


def _action(words: Sequence[str], forms: Mapping[str, str]) -> str:
    """Return what is to be done, if the words are neither too few nor too many for it."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"there is no option {word}", fix=did_you_mean(word, _OPTIONS))
    if not words or words[0] not in forms:
        problem = f"ckpt cannot {words[0]!r}" if words else "ckpt: what is to be done?"
        raise ConfigError(problem, fix=did_you_mean(words[0] if words else "", forms))
    form = forms[words[0]].replace("--as gpt2 ", "").split()
    if len(words) < len(form):
        runs = ", ".join(runs_in(Path("runs"))) if len(words) == 1 else ""
        found = f"; here are: {runs}" if runs else ""
        raise ConfigError(
            f"{form[len(words)]} is missing", fix=f"paceline ckpt {forms[words[0]]}{found}"
        )
    if len(words) > len(form):
        raise ConfigError(
            f"unexpected word {words[len(form)]!r}", fix=f"paceline ckpt {forms[words[0]]}"
        )
    return words[0]


def _list(catalog: Catalog, *, as_json: bool) -> int:
    everything, beside = list_entries(catalog.storage)
    marks = _marks(catalog, everything)
    entries = [entry for entry in everything if catalog.only in {None, entry.step}]
    beside = [] if entries and catalog.only is not None else beside
    if as_json:
        found = [_facts(entry) | {"marks": marks[entry.step]} for entry in entries]
        _print_json(
            {
                "where": catalog.where,
                "checkpoints": found,
                "beside": [item._asdict() for item in beside],
            }
        )
    else:
        table = _table(entries, marks) if entries else ["there are no checkpoints here"]
        below = [
            f"{_BESIDE[item.kind]}: {item.name} ({human_size(item.size_bytes)})" for item in beside
        ]
        print("\n".join([catalog.where, *table, *below]))
    return 0 if entries else 1


def _check(catalog: Catalog, *, as_json: bool) -> int:
    """Say of each checkpoint as soon as it is known whether all is well."""
    found: list[Entry] = []
    for step in catalog.steps():
        if entry := verify_entry(catalog.storage, step):
            found.append(entry)
            if not as_json:
                size = f" ({human_size(entry.manifest.size_bytes)})" if entry.manifest else ""
                print(f"{entry.where}{size}  {_verdict(entry)}", flush=True)
    good = [entry for entry in found if entry.verdict == "ok"]
    if as_json:
        _print_json({"where": catalog.where, "checkpoints": [_facts(entry) for entry in found]})
    elif not found:
        raise PacelineError(f"there are no checkpoints in {catalog.where}", fix=SAVE_FIRST)
    return 0 if found and len(good) == len(found) else 1


def _export(catalog: Catalog, run: str, out: Path, known: argparse.Namespace) -> int:
    done = _exported(catalog, run, out, known)
    if known.json:
        _print_json(done._asdict() | {"path": str(out)})
        return 0
    for problem in done.passed_over:
        print(f"passed over: {problem}", file=sys.stderr)
    print(f"{done.where}\n  -> {out}: {done.tensors:,} tensors, {human_size(done.size_bytes)}\n")
    print(_LAYOUTS[known.layout].format(path=json.dumps(str(out), ensure_ascii=False)))
    if (out / "tokenizer.json").is_file():
        print(_TOKENIZER.format(path=json.dumps(str(out), ensure_ascii=False)))
    return 0


def _exported(catalog: Catalog, run: str, out: Path, known: argparse.Namespace) -> Exported:
    if known.layout not in _LAYOUTS:
        raise ConfigError(
            f"there is no layout {known.layout!r}", fix=did_you_mean(known.layout, _LAYOUTS)
        )
    if known.layout == "safetensors":
        return export_newest(catalog, out, force=known.force)
    if known.force:
        raise ConfigError(
            "--as gpt2 writes a new folder, with or without --force", fix="leave --force out"
        )
    from paceline.recipes.gpt_export import export_gpt2

    return export_gpt2(catalog, run, out)


def _marks(catalog: Catalog, entries: Sequence[Entry]) -> dict[int, list[str]]:
    """Return which checkpoint is the newest, and which is best by the metric that the run's settings name."""
    manifests = {entry.step: entry.manifest for entry in entries if entry.manifest}
    last = manifests[max(manifests)].config if manifests else {}
    rule = catalog.best or str(last.get("checkpoint.best", ""))
    best = (
        best_step({step: manifest.metrics for step, manifest in manifests.items()}, rule)
        if rule
        else None
    )
    marked = {"newest": max((entry.step for entry in entries), default=None), "best": best}
    return {
        entry.step: [mark for mark, step in marked.items() if step == entry.step]
        for entry in entries
    }


def _table(entries: Sequence[Entry], marks: Mapping[int, Sequence[str]]) -> list[str]:
    head = ["step", "samples", "size", "ranks", "metrics", "verdict"]
    rows = [head, *(_row(entry, marks[entry.step]) for entry in entries)]
    step, samples, size, ranks, metrics, _ = (
        max(map(len, column)) for column in zip(*rows, strict=True)
    )
    return [
        f"{row[0]:>{step}}  {row[1]:>{samples}}  {row[2]:>{size}}  {row[3]:>{ranks}}  {row[4]:<{metrics}}  {row[5]}"
        for row in rows
    ]


def _row(entry: Entry, marks: Sequence[str]) -> list[str]:
    verdict = _verdict(entry) + (f" ({', '.join(marks)})" if marks else "")
    if entry.manifest is None:
        return [str(entry.step), "?", "?", "?", "", verdict]
    facts = entry.manifest
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in sorted(facts.metrics.items()))
    ranks = facts.values.get("world_size", "?")
    return [
        str(entry.step),
        f"{facts.samples:,}",
        human_size(facts.size_bytes),
        str(ranks),
        metrics,
        verdict,
    ]


def _facts(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "where": entry.where,
        "verdict": entry.verdict,
        "problems": list(entry.problems),
        "samples": manifest.samples if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "ranks": manifest.values.get("world_size") if manifest else None,
        "metrics": {
            name: value if math.isfinite(value) else None
            for name, value in (manifest.metrics if manifest else {}).items()
        },
    }


def _verdict(entry: Entry) -> str:
    more = len(entry.problems) - _SHOWN
    problems = "; ".join([*entry.problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    return f"{entry.verdict}: {problems}" if problems else entry.verdict


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2))
