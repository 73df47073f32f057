"""How long does a small GPT take to a published loss, on one GPU? `python benchmarks/gpu/shakespeare.py TEXT`

TEXT is tinyshakespeare.txt. 6 layers, 384 wide, 256 characters, dropout 0.2; the last tenth is held out, and the loss to reach
is 1.4697. By hand: the published setting (5,000 steps of 64 rows, compiled, each 250 steps 200 batches of either part are
evaluated), in a plain loop. Paceline: the gpt recipe, a third of the steps, captured instead of compiled. Each in a fresh process;
the time is all of it but imports: reading, compiling, training, evaluating.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402 - after the path
from gpt_contenders import Plain  # noqa: E402
from ratios import rotated, spread, table  # noqa: E402

from paceline.recipes.gpt_model import Design, Shape  # noqa: E402

WANTED = 1.4697
STEPS, ROWS, LENGTH, EVERY, EVALUATED, WARMUP, RATE = 5000, 64, 256, 250, 200, 100, 1e-3
Curve = list[tuple[float, float]]
"""Seconds, and the loss on what was held out."""


def by_hand(text: str) -> Curve:
    """Train with nothing but torch."""
    begun, generator = time.perf_counter(), torch.Generator().manual_seed(1337)
    torch.set_float32_matmul_precision("high")
    letters = sorted(set(content := Path(text).read_text(encoding="utf-8")))
    numbers = torch.tensor([letters.index(letter) for letter in content])
    parts = numbers[: int(0.9 * len(numbers))], numbers[int(0.9 * len(numbers)) :]
    model = Plain(Design(Shape(6, 6, 384), len(letters), LENGTH, bias=False, dropout=0.2)).cuda()
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        places = torch.randint(len(part) - LENGTH, (ROWS,), generator=generator)
        both = [
            torch.stack([part[place + late :][:LENGTH] for place in places.tolist()])
            for late in (0, 1)
        ]
        with torch.autocast("cuda", torch.bfloat16):
            found: torch.Tensor = run(*(rows.pin_memory().cuda(non_blocking=True) for rows in both))
        return found

    curve: Curve = []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step)
        loss_of(parts[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                means = [
                    torch.stack([loss_of(part) for _ in range(EVALUATED)]).mean().item()
                    for part in parts
                ]
            model.train()
            curve.append((time.perf_counter() - begun, means[1]))
    return curve


def rate_at(step: int) -> float:
    """Return the share of the rate: up over the first steps, then half a cosine down to a tenth."""
    if step < WARMUP:
        return step / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def with_paceline(text: str) -> Curve:
    """Train the recipe."""
    from paceline.config import config_from_words
    from paceline.recipes import gpt

    text, begun = str(Path(text).resolve()), time.time()
    os.chdir(tempfile.mkdtemp(prefix="paceline-gpu-"))
    words = f"device=cuda data_folder={text} level=characters windows=overlapping layers=6 heads=6 embedding_dim=384 context_length={LENGTH} dropout=0.2"
    words += f" bias=false batch.global_size={ROWS} batch.lanes=1 steps={STEPS // 3} evaluate_steps={EVERY // 2}"
    words += f" lr.base={RATE} lr.reference_batch={ROWS} lr.warmup_samples={WARMUP * ROWS} precision=bf16 capture=true"
    gpt.main(config_from_words(gpt.GptConfig, [*words.split(), "checkpoint.every=end"]))
    events = [
        json.loads(line)
        for line in Path("runs/gpt/events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found = [event for event in events if event["event"] in {"Evaluated", "EpochDone"}]
    return [(event["time_s"] - begun, event["metrics"]["eval_loss"]) for event in found]


CONTENDERS = {"paceline": with_paceline, "hand-compiled": by_hand}


def measure(name: str, text: str) -> Curve:
    """Run one contender in a process, and with a cache of compiled code, of its own."""
    words = [sys.executable, str(Path(__file__)), text, "--run", name]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="paceline-gpu-")}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    curve: Curve = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{name}: {' '.join(f'{loss:.4f}' for _, loss in curve)}; {curve[-1][0]:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return curve


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", choices=CONTENDERS)
    known = parser.parse_args()
    if known.run:
        print("\n" + json.dumps(CONTENDERS[known.run](known.text)))
        return
    rows = []
    curves: dict[str, list[Curve]] = {name: [] for name in CONTENDERS}
    for number in range(known.rounds):
        for name in rotated(list(CONTENDERS), number):
            curves[name].append(measure(name, known.text))
    whole = median(curve[-1][0] for curve in curves["hand-compiled"])
    for name, runs in curves.items():
        reached = [
            min((second for second, loss in curve if loss <= WANTED), default=math.inf)
            for curve in runs
        ]
        cells = [spread([min(loss for _, loss in curve) for curve in runs], 4), spread(reached, 1)]
        rows.append(
            [
                name,
                *cells,
                spread([curve[-1][0] for curve in runs], 1),
                f"{median(curve[-1][0] for curve in runs) / whole:.2f}",
            ]
        )
    print(
        table(
            ["contender", "least loss", f"s to {WANTED}", "s in all", "of the time by hand"], rows
        )
    )


if __name__ == "__main__":
    main()
