"""What do fewer bytes between ranks cost in loss?

`python benchmarks/fewer_bytes.py` trains two recipes on four ranks, once for every way to tell the others less and for
every seed, and prints the loss on held-out samples and the bytes that a rank sends in a step. The ways: the exact sum of every
step; gradients as bf16 and PowerSGD (`compression`, exact=false); replicas that walk apart for H steps (`local_sgd.steps`), with and without bf16.

Bytes are read from the counter of the loopback interface, in a network namespace that holds nothing but these ranks: what gloo really
sends, headers and all, from the first step to the last. So it needs root, or user namespaces, and `unshare` and `ip`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from ratios import spread, table
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.recipes import gpt, mnist
from paceline.recipes.digits import embedded_digits
from paceline.recipes.gpt_config import GptConfig, design_of, with_vocabulary
from paceline.recipes.gpt_model import GPT
from paceline.recipes.gpt_text import load_text
from paceline.recipes.mnist import MnistConfig, Net
from paceline.train.cuda_graph import step_class
from paceline.train.evaluate import Evaluation
from paceline.world.world import World

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


class Task(NamedTuple):
    """A recipe as this benchmark trains it."""

    kind: type[RunConfig]
    words: list[str]
    build: Callable[[Any, World], tuple[nn.Module, Any, Any, Any]]
    """Settings -> model, training set, held-out set, loss."""


def build_gpt(config: GptConfig, world: World) -> tuple[nn.Module, Any, Any, Any]:
    """Return a GPT and the text that the recipe takes by default."""
    text = load_text(config, world)
    return (
        GPT(design_of(with_vocabulary(config, text.vocabulary))),
        text.train,
        text.test,
        gpt.token_loss,
    )


def build_mnist(config: MnistConfig, _world: World) -> tuple[nn.Module, Any, Any, Any]:
    """Return the network of the mnist recipe and the digits in the package."""
    return Net(config.norm), *embedded_digits(), cross_entropy


TASKS = {
    "gpt": Task(GptConfig, ["steps=256", "context_length=64", "batch.global_size=16"], build_gpt),
    "mnist": Task(MnistConfig, ["batch.global_size=32", "epochs=2"], build_mnist),
}


def sent_bytes() -> int:
    """Return what has gone through the loopback interface of this namespace, from all ranks."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    counters = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counters[8])


def train(task: Task, words: list[str], seed: int, world: World) -> tuple[float, float, int]:
    """Train once; return the held-out loss, the bytes that a rank sent in a step, and the steps. Every rank must call this."""
    config: Any = config_from_words(task.kind, [*task.words, f"seed={seed}", *words])
    paceline.world.randomness.seed_everything(seed)
    module, samples, held_out, loss = task.build(config, world)
    model = paceline.parallelize(module, world, config)
    recipe: Any = gpt if task.kind is GptConfig else mnist
    optimizer = recipe.build_optimizer(model, config)
    batches = paceline.Batches(samples, config, world)
    take = step_class(world, optimizer, config)(
        world, model, optimizer, loss, config, batches.total_samples
    )
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    for step in batches.steps():
        take(step)
    dist.barrier()
    sent = (sent_bytes() - before) / world.size / batches.total_steps
    dist.barrier()
    found = Evaluation(held_out, loss, {}, config, world).run(model)
    return found["eval_loss"], sent, batches.total_steps


def measure(name: str, known: argparse.Namespace, world: World) -> str:
    """Train a task in every way, seed after seed, and return the table."""
    task = TASKS[name]
    losses, sent = defaultdict(list), {}
    for seed in range(known.seeds):
        for way in known.ways:
            begun = time.perf_counter()
            loss, sent[way], steps = train(task, way.split(), seed, world)
            losses[way].append(loss)
            if world.is_main:
                print(
                    f"{name} seed {seed} {way}: {loss:.4f}, {time.perf_counter() - begun:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    plain = sent[known.ways[0]]
    rows = [
        [way, spread(losses[way], 4), f"{sent[way] / 1e3:,.1f}", f"1/{plain / sent[way]:.1f}"]
        for way in known.ways
    ]
    head = (
        f"\n{name}, {steps} steps on {world.size} ranks, {known.seeds} seeds; median (min-max)\n\n"
    )
    return head + table(["way", "held-out loss", "kB a rank sends in a step", "of the first"], rows)


def main() -> None:
    """Start the ranks in a namespace of their own, or be one of them."""
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
    known = parser.parse_args()
    if "RANK" in os.environ:
        with paceline.join(RunConfig()) as world:
            for name in known.tasks:
                found = measure(name, known, world)
                if world.is_main:
                    print(found, flush=True)
    elif _INSIDE in os.environ:
        subprocess.run([shutil.which("ip") or "ip", "link", "set", "lo", "up"], check=True)
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            f"-n{RANKS}",
            __file__,
            "--",
            *sys.argv[1:],
        ]
        sys.exit(
            subprocess.run(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
            ).returncode
        )
    else:
        alone = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        command = [*alone, sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {_INSIDE: "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
