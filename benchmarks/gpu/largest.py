"""What is the largest GPT that one GPU trains? `python benchmarks/gpu/largest.py`

Layers of one width are added until memory ends: first twice as many at a time, then by halves of what is left. Every try is a fresh
process that takes three optimizer steps of one row with parallel=fsdp on one rank, recomputed blocks and AdamW; weights are
drawn on the GPU, as the host would take minutes for billions of them. It says what fits, what does not, and where that one failed.
`--device cpu --tiny` tries the command itself, on a machine without a GPU; there `--limit-gb` stands for the memory that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ratios import table  # noqa: E402 - after the path

STEPS = 3
TINY = {"width": 32, "heads": 2, "length": 16, "tokens": 64, "first": 1, "most": 4}
HEAD = ["layers", "parameters", "peak memory", "tokens/s", "end"]


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest number that fits, of 1 to `most`; 0: none does.

    >>> tried = []
    >>> largest(lambda size: tried.append(size) or size <= 11, 4, 100), tried
    (11, [4, 8, 16, 12, 10, 11])
    >>> largest(lambda size: True, 4, 10), largest(lambda size: False, 4, 10)
    (10, 0)
    """
    good, bad, size = 0, most + 1, min(first, most)
    while bad - good > 1:
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def attempt(known: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Try so many layers in a fresh process; return what it found."""
    names = ("device", "width", "heads", "length", "tokens", "precision", "limit_gb")
    words = [
        word
        for name in names
        for word in (f"--{name.replace('_', '-')}", str(getattr(known, name)))
    ]
    # Memory that grows in place is not torn into pieces too small for the next tensor.
    env = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, str(Path(__file__).resolve()), "--layers", str(layers), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:  # no answer: the kernel ended it, or it is broken
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        if done.returncode >= 0:
            raise SystemExit(
                f"{layers} layers failed with code {done.returncode}:\n{done.stderr[-3000:]}"
            )
        return {
            "layers": layers,
            "parameters": 0,
            "end": f"killed by signal {-done.returncode}: {last[0]}",
        }
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def row_of(found: dict[str, Any]) -> list[str]:
    """Return a try as a row of the table."""
    rate = f"{found['tokens_per_s']:,.0f}" if found.get("tokens_per_s") else ""
    peak = f"{found['peak_gb']:.1f} GB" if "peak_gb" in found else ""
    return [str(found["layers"]), _millions(found["parameters"]), peak, rate, found["end"]]


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.2f} million" if parameters else ""


def train(known: argparse.Namespace) -> dict[str, Any]:
    """Build a GPT of so many layers and take three steps; return what that took, or where memory ended."""
    import torch

    found: dict[str, Any] = {"layers": known.layers, "parameters": 0, "end": "all steps done"}
    try:
        _steps(known, found)
    except (
        RuntimeError,
        MemoryError,
    ) as error:  # CUDA and its libraries have several ways to say it
        if not any(word in str(error) for word in ("out of memory", "ALLOC_FAILED", "--limit-gb")):
            raise
        found["end"] = f"out of memory {found['end']}: {' '.join(str(error).split())[:160]}"
        found.pop("tokens_per_s", None)
    if known.device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return found


def _steps(known: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch

    import paceline
    from paceline.config import config_from_words
    from paceline.recipes.gpt import GPT, Block, GptConfig, build_optimizer, design_of, token_loss

    words = [
        f"device={known.device}",
        f"layers={known.layers}",
        f"heads={known.heads}",
        f"embedding_dim={known.width}",
        f"context_length={known.length}",
        f"vocab_size={known.tokens}",
    ]
    words += [
        "parallel=fsdp",
        "recompute=true",
        f"precision={known.precision}",
        f"steps={STEPS}",
        "epochs=1",
    ]
    words += [
        "batch.global_size=1",
        "batch.lanes=1",
        "lr.schedule=constant",
        "lr.base=1e-4",
        "lr.reference_batch=1",
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(_Measured),
        paceline.Run(config_from_words(GptConfig, [*words, f"runs={folder}"])) as run,
    ):
        found["end"] = "while weights were drawn"
        with torch.device(run.device):
            gpt = GPT(design_of(run.config))
        found["parameters"] = sum(value.numel() for value in gpt.parameters())
        model = run.model(gpt, wrap=(Block,))
        optimizer = run.optimizer(build_optimizer(model, run.config))
        text = torch.randint(
            0, known.tokens, (STEPS, known.length + 1), generator=torch.Generator().manual_seed(0)
        )
        data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        _limit(known, found["parameters"])
        for number, step in enumerate(run.steps(data), 1):
            found["end"] = f"in step {number}"
            begun = time.perf_counter()
            run.update(optimizer, lambda batch: token_loss(model(batch[0]), batch[1]), step)
            if known.device == "cuda":
                torch.cuda.synchronize()
            # Of the last step: all is warm.
            found["tokens_per_s"] = known.length / (time.perf_counter() - begun)
            if number == STEPS:
                found["end"] = "all steps done"
                raise _Measured


class _Measured(Exception):
    """Leaves a run without saving it: its state would fill the disk."""


def _limit(known: argparse.Namespace, parameters: int) -> None:
    """Let memory end where there is no GPU whose memory could: weights, gradients and AdamW's two means, of 4 bytes each."""
    if known.limit_gb and 16 * parameters > known.limit_gb * 1e9:
        raise MemoryError(
            f"{16 * parameters / 1e9:.6f} GB are more than --limit-gb {known.limit_gb}"
        )


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a model that any machine trains, to try the command"
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=50_304)
    parser.add_argument(
        "--precision", default="bf16", help="as of a run: bf16 is autocast over fp32 weights"
    )
    parser.add_argument("--first", type=int, default=8, help="layers of the first try")
    parser.add_argument("--most", type=int, default=512, help="layers of the largest try")
    parser.add_argument(
        "--limit-gb",
        type=float,
        default=0.0,
        help="call more than this out of memory; 0: see for real",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="try this one only, in this process, and print it as JSON",
    )
    tiny = "--tiny" in (sys.argv[1:] if words is None else words)
    parser.set_defaults(**TINY if tiny else {})
    return parser.parse_args(words)


def main() -> None:
    """Find it, and print every try."""
    known = parsed()
    if known.layers:
        print("\n" + json.dumps(train(known)), flush=True)
        return
    tries: dict[int, dict[str, Any]] = {}

    def fits(layers: int) -> bool:
        tries[layers] = attempt(known, layers)
        print(
            " · ".join(word for word in row_of(tries[layers]) if word), file=sys.stderr, flush=True
        )
        return bool(tries[layers]["end"] == "all steps done")

    found = largest(fits, known.first, known.most)
    print(table(HEAD, [row_of(tries[layers]) for layers in sorted(tries)]))
    if found == 0:
        raise SystemExit("not even one layer fits")
    why = (
        "as many as were to be tried"
        if found == known.most
        else f"{tries[found + 1]['end']} with one more"
    )
    print(
        f"\nlargest: {found} layers of width {known.width}, {_millions(tries[found]['parameters'])} parameters; {why}"
    )


if __name__ == "__main__":
    main()
