"""How fast are Paceline's kernels for parts of a GPT-2 124M training step? `python benchmarks/gpu/step_parts.py`

Loss, MLP, output layer in fp8 and causal attention at 64 x 1,024 tokens, 12 heads of 64, 50,304 tokens in the
vocabulary, bf16, beside torch's. Each candidate runs twice: its results are compared with a formula in fp64 or with the
first candidate, and its bits with those of the other run. Then all are timed in turns, forward with backward, by CUDA
events: MLP and attention of one layer of twelve. A candidate that fails is a row of the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

from parts.attention_cases import kernel_parts, whole_parts  # noqa: E402 - after the path
from parts.cases import head_parts, loss_parts, mlp_parts  # noqa: E402
from parts.measuring import HEAD, Part, Row, failure_of, measure  # noqa: E402
from parts.shapes import Sizes, gpt2_124m  # noqa: E402
from ratios import table  # noqa: E402

PARTS: dict[str, list[Callable[[Sizes], list[Part]]]] = {
    "loss": [loss_parts],
    "mlp": [mlp_parts],
    "fp8": [head_parts],
    "attention": [whole_parts, kernel_parts],
}
SHARES = {"loss": 0.2, "mlp": 0.1, "fp8": 0.1, "attention": 0.6}
"""What part of the time each may take; most of it goes to the compilation of kernels."""


def rows_of(part: Part, rounds: int, deadline: float) -> list[Row]:
    """Measure a part, and say so at once: a later one may end the process."""
    rows = measure(part, rounds, deadline, cuda=True)
    today = next((row.times for row in rows if row.times), [])
    for row in rows:
        print("  ".join(row.words(today)), file=sys.stderr, flush=True)
    return rows


def measured(name: str, sizes: Sizes, rounds: int, deadline: float) -> list[list[str]]:
    """Return the cells of all candidates of one part of the command line."""
    cells: list[list[str]] = []
    for make in PARTS[name]:
        try:
            parts = make(sizes)
        except Exception as error:  # noqa: BLE001 - the other parts are still measured
            cells.append(Row(name, make.__name__, failure=failure_of(error)).words([]))
            continue
        for part in parts:
            rows = rows_of(part, rounds, deadline)
            cells += [row.words(rows[0].times) for row in rows]
        del parts, part
        torch.cuda.empty_cache()
    return cells


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="skip what has not begun after this time"
    )
    known = parser.parse_args()
    sizes = gpt2_124m("cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, file=sys.stderr)
    begun = time.monotonic()
    names = [name for name in PARTS if name in known.only]
    whole = sum(SHARES[name] for name in names)
    cells: list[list[str]] = []
    done = 0.0
    for name in names:
        done += SHARES[name] / whole
        cells += measured(name, sizes, known.rounds, begun + done * known.seconds)
    print(table(HEAD, cells))
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
