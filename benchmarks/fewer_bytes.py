"""What do fewer bytes between ranks cost in loss?

`python benchmarks/fewer_bytes.py` trains two recipes on four ranks, once for every way to send less and for every seed,
and prints the loss on held-out samples and the bytes that a rank sends per step. The ways: the exact sum of every step;
gradients as bf16 and PowerSGD (`compression`, exact=false); replicas that train independently for H steps
(`local_sgd.steps`), with and without bf16. Each training is a loop over `paceline.Run` in processes of its own.

Bytes are read from the counter of the loopback interface, in a network namespace with nothing but these ranks: what gloo
really sends, headers included, from the first step to the end of the loop. So it needs root, or user namespaces, and `unshare` and `ip`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ratios import spread, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.recipes import gpt, mnist
from paceline.recipes.digits import embedded_digits
from paceline.recipes.gpt_config import GptConfig, design_of, with_vocabulary
from paceline.recipes.gpt_model import GPT
from paceline.recipes.gpt_text import load_text
from paceline.recipes.mnist import MnistConfig, Net

RANKS = 4
WAYS = (
    "exact=true",
    "exact=false compression=bf16",
    "exact=false compression=powersgd",
    "local_sgd.steps=8",
    "local_sgd.steps=8 local_sgd.outer_lr=1 local_sgd.outer_momentum=0",
    "local_sgd.steps=32",
    "local_sgd.steps=32 compression=bf16",
)
_INSIDE = "FEWER_BYTES_INSIDE"
_MARK = "FOUND "


class Result(NamedTuple):
    """What one training gave."""

    loss: float
    """On held-out samples."""
    sent: float
    """Bytes per rank and step."""
    steps: int


class Task(NamedTuple):
    """A recipe as this benchmark trains it."""

    kind: type[RunConfig]
    words: list[str]
    build: Callable[[Any, paceline.Run], tuple[nn.Module, Any, Any, Any]]
    """Settings -> model, training dataset, held-out dataset, loss."""
    build_optimizer: Callable[[nn.Module, Any], Any]


def build_gpt(config: GptConfig, run: paceline.Run) -> tuple[nn.Module, Any, Any, Any]:
    """Return a GPT and the text that the recipe takes by default."""
    text = load_text(config, run.world)
    return (
        GPT(design_of(with_vocabulary(config, text.vocabulary))),
        text.train,
        text.test,
        gpt.token_loss,
    )


def build_mnist(config: MnistConfig, _run: paceline.Run) -> tuple[nn.Module, Any, Any, Any]:
    """Return the network of the mnist recipe and the digits in the package."""
    return Net(config.norm), *embedded_digits(), cross_entropy


GPT_WORDS = ["steps=256", "context_length=64", "batch.global_size=16"]
MNIST_WORDS = ["batch.global_size=32", "epochs=2", "lr.base=0.001"]
TASKS = {
    "gpt": Task(GptConfig, GPT_WORDS, build_gpt, gpt.build_optimizer),
    "mnist": Task(MnistConfig, MNIST_WORDS, build_mnist, mnist.build_optimizer),
}


def sent_bytes() -> int:
    """Return what has gone through the loopback interface of this namespace, from all ranks."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    counters = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counters[8])


def train(task: Task, config: Any) -> Result:
    """Train once. Every rank must call this."""
    with paceline.Run(config) as run:
        module, samples, held_out, criterion = task.build(config, run)
        model = run.model(module)
        optimizer = run.optimizer(task.build_optimizer(model, config))

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            inputs, target = batch
            value: Tensor = criterion(model(inputs), target)
            return value

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
            samples = len(batch[1])
            return {"loss": (loss(batch) * samples, samples)}

        before = done = 0
        for step in run.steps(samples):
            if not done:
                before = agreed_bytes(run)
            run.update(optimizer, loss, step)
            done += 1
        sent = (agreed_bytes(run) - before) / run.world.size / done
        return Result(run.evaluate(held_out, score)["loss"], sent, done)


def agreed_bytes(run: paceline.Run) -> int:
    """Return the counter at a moment when no rank sends. Every rank must call this."""
    run.barrier()
    sent = sent_bytes()
    run.barrier()
    return sent


def be_a_rank(name: str, words: list[str]) -> None:
    """Train a task with these settings; rank 0 prints the result."""
    task = TASKS[name]
    fixed = ["checkpoint.every=end", "log.every_steps=1000000"]
    found = train(task, config_from_words(task.kind, [*task.words, *fixed, *words]))
    if os.environ["RANK"] == "0":
        print(_MARK + json.dumps(found), flush=True)


def start(name: str, words: list[str]) -> Result:
    """Train in processes of their own; return the result."""
    command = [sys.executable, "-m", "paceline", "run", f"-n{RANKS}", str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--train", name, *words], cwd=folder, capture_output=True, text=True,
            check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} {words} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Result(*json.loads(done.stdout.partition(_MARK)[2].partition("\n")[0]))


def measure(name: str, known: argparse.Namespace) -> str:
    """Train a task in every way, seed after seed, and return the table."""
    losses, sent, steps = defaultdict(list), {}, 0
    for seed in range(known.seeds):
        for way in known.ways:
            begun = time.perf_counter()
            loss, sent[way], steps = start(name, [f"seed={seed}", *known.settings, *way.split()])
            losses[way].append(loss)
            took = f"{time.perf_counter() - begun:.0f} s"
            print(f"{name} seed {seed} {way}: {loss:.4f}, {took}", file=sys.stderr, flush=True)
    plain = sent[known.ways[0]]
    rows = [
        [way, spread(losses[way], 4), f"{sent[way] / 1e3:,.1f}", f"1/{plain / sent[way]:.1f}"]
        for way in known.ways
    ]
    head = f"\n{name}, {steps} steps on {RANKS} ranks, {known.seeds} seeds; median (min-max)\n\n"
    return head + table(["way", "held-out loss", "kB per rank and step", "of the first"], rows)


def main() -> None:
    """Start the trainings in a network namespace of their own, or be a rank of one."""
    if sys.argv[1:2] == ["--train"]:
        be_a_rank(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="how often each way is trained")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--ways",
        nargs="*",
        default=WAYS,
        help='others, such as "local_sgd.steps=8 local_sgd.outer_lr=1"',
    )
    parser.add_argument(
        "--settings", nargs="*", default=[], help="settings for every training, such as steps=16"
    )
    known = parser.parse_args()
    if _INSIDE in os.environ:
        subprocess.run([shutil.which("ip") or "ip", "link", "set", "lo", "up"], check=True)
        for name in known.tasks:
            print(measure(name, known), flush=True)
    else:
        alone = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        command = [*alone, sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {_INSIDE: "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
