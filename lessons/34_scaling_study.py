"""Lesson 34: A scaling study for a proposal.

A computing centre wants to see that a program uses its nodes well. Strong scaling runs the same step on
more ranks; weak scaling keeps the samples per rank. A time without its error says little, so all sizes
are measured in several rounds, by turns. By Amdahl's law a part s of a step takes as long on any number
of ranks: T(p) = T(1) (s + (1 - s) / p), and the speed-up stays below 1 / s. A straight line through T
over 1 / p gives s. The steps here sleep as long as a slow device would compute, with a known s, so that
four ranks fit on two cores; groups of these four ranks stand for the sizes, so that they start once.

    torchrun --standalone --nproc-per-node 4 lessons/34_scaling_study.py hand
    paceline scale --worlds 1,2,4 --rounds 1 --steps 5 --warmup 1 lessons/34_scaling_study.py batch.global_size=64

Expect: s above the 20 % that are built in (25 to 45 %), because gradients are computed and sent as well;
weak scaling looks better, since s does not grow; 2 ranks are the cheapest, because they fill a node.
`paceline scale` starts every size anew, three times without `--rounds`, and writes the report.
Time: about 30 s on 2 cores.
New since lesson 7: `by_hand`, `measure`, `mean_and_error`, `report` and `node_hours`, with `SIZES`, `ROUNDS`,
`WARMUP`, `STEPS`, `SERIAL_S`, `SAMPLE_S`, `PLANNED_STEPS` and `RANKS_PER_NODE`, replace `train`, `share_of`,
`pick_device`, `join` and `EPOCHS`; `main` and its `loss` are the same step with Paceline.
"""

import math
import sys
import time
from statistics import linear_regression, mean, stdev

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, RATE = 64, 0.05
SIZES, ROUNDS, WARMUP, STEPS = (1, 2, 4), 3, 1, 5
SERIAL_S, SAMPLE_S = 0.02, 0.00125  # per step and per sample: 20 + 80 ms for 64 samples
PLANNED_STEPS, RANKS_PER_NODE = 1_000_000, 2


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def measure(
    group: dist.ProcessGroup, batch: int, images: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Train a few steps on the ranks of a group; return the seconds of a step, and the last loss."""
    torch.manual_seed(0)  # the same initial weights on every rank
    rank, size = dist.get_rank(), dist.get_world_size(group)
    model = DistributedDataParallel(make_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            begun = time.perf_counter()
        mine = torch.arange(step * batch + rank, (step + 1) * batch, size) % len(images)
        time.sleep(SERIAL_S + SAMPLE_S * len(mine))
        loss = cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total, group=group)
    return (time.perf_counter() - begun) / STEPS, total.item()


def by_hand() -> None:
    """Measure all sizes in rounds, forward and backward by turns; the other ranks wait."""
    dist.init_process_group("gloo")
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    times = {kind: {size: [] for size in SIZES} for kind in ("strong", "weak")}
    losses, samples = [], embedded_digits()[0]
    for turn in range(ROUNDS):
        for kind, size in [(kind, size) for kind in times for size in SIZES[:: 1 - turn % 2 * 2]]:
            if dist.get_rank() < size:
                batch = BATCH * size if kind == "weak" else BATCH
                seconds, loss = measure(groups[size], batch, *samples)
                times[kind][size].append(seconds)
                losses += [loss] if kind == "strong" else []
            dist.barrier()
    if dist.get_rank() == 0:
        assert max(losses) - min(losses) < 1e-3, "strong scaling is the same training at every size"
        report(times)
    dist.destroy_process_group()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean of repeated measurements, and its standard error."""
    return mean(values), stdev(values) / math.sqrt(len(values))


def node_hours(step_s: float, ranks: int) -> float:
    """Return what the planned training costs: the hours of all nodes that it occupies."""
    nodes = math.ceil(ranks / RANKS_PER_NODE)  # a node that is used in part is charged in full
    return nodes * PLANNED_STEPS * step_s / 3600


def report(times: dict[str, dict[int, list[float]]]) -> None:
    """Print speed-up and efficiency of all sizes, the serial part of a step, and the costs."""
    for kind, size in [(kind, size) for kind in times for size in SIZES]:
        first, step = mean_and_error(times[kind][1]), mean_and_error(times[kind][size])
        speed_up = first[0] / step[0] * (size if kind == "weak" else 1)  # weak: more work per step
        error = speed_up * math.hypot(step[1] / step[0], first[1] / first[0]) if size > 1 else 0.0
        print(
            f"{kind}, ranks {size}: {step[0] * 1e3:.1f} ± {step[1] * 1e3:.1f} ms, speed-up {speed_up:.2f} ± {error:.2f}, efficiency {speed_up / size:.0%}"
        )
    rounds = zip(*times["strong"].values(), strict=True)
    lines = [linear_regression([1 / size for size in SIZES], one) for one in rounds]
    serial, error = mean_and_error([one.intercept / (one.intercept + one.slope) for one in lines])
    print(f"Amdahl: serial part {serial:.1%} ± {error:.1%}, so no speed-up above {1 / serial:.1f}")
    for size, seconds in times["strong"].items():
        cost, error = mean_and_error([node_hours(one, size) for one in seconds])
        print(f"{PLANNED_STEPS:,} steps, ranks {size}: {cost:.1f} ± {error:.1f} node-hours")


def main(config: paceline.RunConfig) -> None:
    """Train with the same cost per step and per sample, for `paceline scale`."""
    with paceline.Run(config) as run:
        model = run.model(make_model())
        sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        optimizer = run.optimizer(sgd)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            time.sleep(SAMPLE_S * len(batch[0]))
            return cross_entropy(model(batch[0]), batch[1])

        for step in run.steps(embedded_digits()[0]):
            time.sleep(SERIAL_S)
            run.update(optimizer, loss, step)


if __name__ == "__main__":
    by_hand() if "hand" in sys.argv else main(paceline.config_from_argv())
