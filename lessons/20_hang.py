"""Lesson 20: Find a hang.

If one rank does not reach a collective, all others block in it without a message: nothing fails,
nothing moves, and after ten to thirty minutes a timeout names the wrong rank. With `hang`, the last
rank skips a batch, as a bug in one branch of the code would. To find it, compare the stacks of all
ranks: the odd one out is the cause. Here faulthandler prints them after five seconds in one step, and
the timeout is fifteen.

    torchrun --standalone --nproc-per-node 2 lessons/20_hang.py hang    fails: after 5 s, the stacks
    torchrun --standalone --nproc-per-node 2 lessons/20_hang.py         without the bug
    paceline run -n 2 --max-restarts 0 lessons/20_hang.py paceline name=hang timeout.step_s=10    fails: after 4 s, the verdict

Expect: the stack of rank 0 after 5 s: it is in `backward` and waits for a gradient. The stack of rank 1
after 7 s: it has finished its epochs and waits for rank 0 in `barrier`. Eight seconds later both time
out. The last command has the same bug under `paceline.Run`: its watchdog says in one sentence which
rank called which collective, and `paceline hang runs/hang` shows it again. `py-spy dump --pid PID` shows
the stack of any Python process from outside. (On GPUs rank 0 is in `item`: NCCL only queues what
backward sends. And its barrier is an all-reduce like any other: it may pair with a gradient, and give
wrong numbers instead of a hang.)
Time: about 45 s on 2 cores.
New since lesson 6: a shorter timeout in `join`; the rank that skips a batch, and the stacks, in `main`;
the same bug in `under_paceline`.
"""

import faulthandler
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05


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
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=15)
    )
    return dist.get_rank(), dist.get_world_size()


def make_model() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of digits that the model classifies correctly."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def share_of(rank: int, size: int, samples: int, epoch: int) -> Tensor:
    """Return the samples of this rank in an epoch: every size-th of one shuffled order."""
    generator = torch.Generator().manual_seed(epoch)  # a new order in every epoch
    order = torch.randperm(samples, generator=generator)
    complete = samples - samples % BATCH  # a mean of means needs equal parts
    return order[rank:complete:size]


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    forgetful = "hang" in sys.argv and rank == size - 1
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), held_out = embedded_digits()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        total, mine = 0.0, share_of(rank, size, len(images), epoch)
        for batch in mine.split(BATCH // size)[forgetful:]:
            faulthandler.dump_traceback_later(5 + 2 * rank)  # unless this is called again in time
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"rank {rank}, epoch {epoch + 1}: {len(mine)} samples, loss {total / len(mine):.4f}")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"rank {rank}: accuracy {accuracy(model, test_images, test_labels):.3f}")
    faulthandler.dump_traceback_later(5 + 2 * rank)
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def under_paceline() -> None:
    """Train with the same bug under `paceline.Run`."""
    sys.argv.remove("paceline")  # the other arguments are settings
    train, _ = embedded_digits()
    with paceline.Run(paceline.config_from_argv()) as run:
        model = run.model(make_model())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
        for step in run.steps(train):
            if step.index == 3 and run.world.rank == run.world.size - 1:
                continue  # the last rank skips a batch
            run.update(optimizer, lambda lane: cross_entropy(model(lane[0]), lane[1]), step)


if __name__ == "__main__":
    under_paceline() if "paceline" in sys.argv else main()
