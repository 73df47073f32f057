"""Lesson 28: Find a straggler.

One rank computes slowly: a hot GPU, a busy core. All others wait for it in every step, so a step takes
as long on every rank. Backward misleads: the all-reduce happens in it, so it is long on the ranks that
wait, and short on the rank that they wait for. The time until the first bucket of gradients is ready to
be sent tells them apart: until then a rank works alone. Here the last rank sleeps in forward.

    torchrun --standalone --nproc-per-node 2 lessons/28_straggler.py
    paceline run -n 2 lessons/28_straggler.py paceline name=straggler epochs=2 batch.global_size=64

Expect: about the same time per step on both ranks, a long backward on rank 0, and a late first bucket on
rank 1, the straggler. Paceline measures this in every run: after about 5 s it names rank and phase.
Time: about 25 s on 2 cores.
New since lesson 6: `Stopwatch`, its hook in `main`, the slow rank in `loss_of` with its `SLOW_S`, and the
same in `under_paceline`; one epoch is enough, so `EPOCHS` and `accuracy` are gone.
"""

import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, RATE, SLOW_S = 64, 0.05, 0.1


def pick_device() -> torch.device:
    """Return the GPU of this local rank, or the CPU if there are not enough GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # "cuda" without a number would be GPU 0 everywhere
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> tuple[int, int]:
    """Join the process group; return rank and world size, which torchrun passes as variables."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return the samples of this rank in an epoch: every size-th of one shuffled order."""
    generator = torch.Generator().manual_seed(epoch)  # a new order in every epoch
    order = torch.randperm(samples, generator=generator)
    complete = samples - samples % BATCH  # a mean of means needs equal parts
    return order[rank:complete:size]


def loss_of(model: nn.Module, images: Tensor, labels: Tensor, *, is_slow: bool) -> Tensor:
    """Return the loss; a slow rank takes longer."""
    if is_slow:
        time.sleep(SLOW_S)
    return cross_entropy(model(images), labels)


class Stopwatch:
    """Times the steps of a rank, in milliseconds."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.times: dict[str, list[float]] = {"step": [], "backward": [], "first bucket": []}

    def note(self, name: str, since: float) -> None:
        """Keep how long something took."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels are only queued: wait until they have run
        self.times[name].append(1000 * (time.perf_counter() - since))

    def send(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket, as DDP does by itself; of each step, time the first one."""
        if bucket.index() == 0:
            self.note("first bucket", self.begun)
        return allreduce_hook(dist.group.WORLD, bucket)


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), _ = embedded_digits()
    model, watch = DistributedDataParallel(make_model().to(device)), Stopwatch()
    model.register_comm_hook(None, watch.send)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for batch in share_of(rank, size, len(images), epoch=0).split(BATCH // size):
        watch.begun = time.perf_counter()
        samples = images[batch].to(device), labels[batch].to(device)
        loss = loss_of(model, *samples, is_slow=rank == size - 1)
        optimizer.zero_grad()
        half = time.perf_counter()
        loss.backward()
        watch.note("backward", half)
        optimizer.step()
        watch.note("step", watch.begun)
    typical = torch.tensor([median(times) for times in watch.times.values()], device=device)
    table = [torch.empty_like(typical) for _ in range(size)]
    dist.all_gather(table, typical)
    if rank == 0:
        for one, t in enumerate(table):
            print(f"rank {one}: step {t[0]:.0f}, backward {t[1]:.0f}, first bucket {t[2]:.0f} ms")
        straggler = max(range(size), key=lambda one: table[one][2])
        print(f"the straggler is rank {straggler}")
    dist.destroy_process_group()


def under_paceline() -> None:
    """Train with the same slow rank under `paceline.Run`."""
    sys.argv.remove("paceline")  # the other arguments are settings
    with paceline.Run(paceline.config_from_argv()) as run:
        is_slow = run.world.rank == run.world.size - 1
        model = run.model(make_model())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
        for step in run.steps(embedded_digits()[0]):
            run.update(optimizer, lambda lane: loss_of(model, *lane, is_slow=is_slow), step)


if __name__ == "__main__":
    under_paceline() if "paceline" in sys.argv else main()
