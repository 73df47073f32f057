"""Train a table of models on 1, 2 and 3 ranks and through two resumes: each gives the same bits, or is refused.

`python scripts/model_table.py [-k WORD ...] [--list]`; all of it takes some minutes on 2 cores. Every line says "same",
or "refused" with the message, or "trained" if exact=false. The exit code is 1 if a line says "different" or "traceback".
`--device cuda` trains on 1 and 2 ranks, which may share a card. `--pairs` has other lines: in them every two choices of
backend, parallelism, precision, compilation, capture, compression, optimizer and model meet. `make gpu` runs those on a GPU, and
`--to FOLDER` writes the table. Results: docs/notes.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from combinations.pairs import lines
from combinations.ranks import preload
from combinations.table import COMBINATIONS
from combinations.verdicts import Judge, Verdict

from paceline.world.machine import machine_facts


def main() -> int:
    """Judge the chosen lines; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", nargs="*", default=[], help="only lines that contain all these words")
    parser.add_argument("-j", type=int, default=2, help="lines to judge at the same time")
    parser.add_argument("--list", action="store_true", help="only show the names")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", action="store_true", help="every two choices meet in a line")
    parser.add_argument("--to", type=Path, help="folder for table.txt and table.json")
    known = parser.parse_args()
    names = lines(known.device) if known.pairs else list(COMBINATIONS)
    names = [name for name in names if all(word in name for word in known.k)]
    if known.list:
        print("\n".join(names))
        return 0
    preload()
    begun, verdicts = time.monotonic(), []
    for verdict in judged(names, known.j, known.device):
        print(f"{verdict.name:<48} {verdict}", flush=True)
        verdicts.append(verdict)
    seconds = time.monotonic() - begun
    print(summary(verdicts, seconds))
    if known.to:
        write(known.to, verdicts, seconds)
    return int(not all(verdict.is_good for verdict in verdicts))


def summary(verdicts: list[Verdict], seconds: float) -> str:
    """Return how many lines have each verdict."""
    counts = Counter(verdict.kind for verdict in verdicts)
    found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"{len(verdicts)} combinations in {seconds:.0f} s: {found}"


def write(folder: Path, verdicts: list[Verdict], seconds: float) -> None:
    """Write the table as text and as JSON, with what it ran on."""
    facts = machine_facts() | {"torch": torch.__version__, "gpus": gpus()}
    if facts["gpus"]:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    text = [f"{name}: {value}" for name, value in facts.items()]
    text += [f"{verdict.name:<80} {verdict}" for verdict in verdicts]
    text += [summary(verdicts, seconds), ""]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.txt").write_text("\n".join(text), encoding="utf-8")
    table = {"facts": facts, "seconds": seconds, "lines": [each._asdict() for each in verdicts]}
    (folder / "table.json").write_text(json.dumps(table, indent=2), encoding="utf-8")


def gpus() -> list[str]:
    """Return the names of the GPUs."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def judged(names: list[str], at_once: int, device: str) -> Iterator[Verdict]:
    """Yield the verdict of every line, in order."""
    with tempfile.TemporaryDirectory(prefix="paceline-table-") as folder:
        judges = [Judge(Path(folder) / str(number), device) for number in range(at_once)]
        free = list(judges)

        def judge(name: str) -> Verdict:
            mine = free.pop()
            try:
                return mine.judge(name)
            finally:
                free.append(mine)

        try:
            with ThreadPoolExecutor(at_once) as pool:
                yield from pool.map(judge, names)
        finally:
            for each in judges:
                each.close()


if __name__ == "__main__":
    sys.exit(main())
