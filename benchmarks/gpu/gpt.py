"""How many tokens a second does GPT-2 124M train on, on one GPU? `python benchmarks/gpu/gpt.py`

Rows of 1,024 tokens, bf16, AdamW, clipped, no biases: a plain compiled loop, as nanoGPT has one (which is on no package
index); the same model in a loop over `paceline.Run` whose updates are captured, free and exact, with events, heartbeat and
progress; with `paceline.Trainer`; free with an output layer in fp8; and Hugging Face's GPT-2 (with biases), eager and
compiled. Each round starts every contender once in a fresh process, in rotated order; ratios are to the first.
transformers must be installed beside Paceline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ratios import ratios, rotated, spread, table  # noqa: E402 - after the path

ROWS = {
    "hand-compiled": 64,
    "paceline-free": 64,
    "paceline": 64,
    "paceline-trainer": 64,
    "paceline-fp8": 64,
    "transformers": 32,
    "transformers-compiled": 32,
}
"""How many rows a step has: what suits each."""
_FIRST = "hand-compiled"
FLOPS_PER_TOKEN = (
    6 * 123.6e6 + 12 * 12 * 768 * 1024
)  # without the vectors of places, which multiply nothing
PEAK = 989e12


def measure(name: str, steps: int) -> float:
    """Run one contender; return tokens per second."""
    words = [sys.executable, str(HERE / "gpt_contenders.py"), name, str(ROWS[name]), str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{name}: {found['tokens_per_s']:,.0f} tokens/s, {found['memory_gb']:.1f} GB",
        file=sys.stderr,
        flush=True,
    )
    return float(found["tokens_per_s"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    known = parser.parse_args()
    names = [name for name in ROWS if name in {*known.only, _FIRST}]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(known.rounds):
        for name in rotated(names, number):
            found[name].append(measure(name, known.steps))
    base = found[_FIRST]
    rows = [
        [
            name,
            str(ROWS[name]),
            f"{median(rates):,.0f}",
            f"{median(rates) * FLOPS_PER_TOKEN / PEAK:.1%}",
            spread(ratios(rates, base)),
        ]
        for name, rates in found.items()
    ]
    print(table(["contender", "rows a step", "tokens/s", "MFU of 989 TFLOP/s", "ratio"], rows))


if __name__ == "__main__":
    main()
