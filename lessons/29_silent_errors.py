"""Lesson 29: Silent errors.

DDP gives all ranks the same gradients, and trusts that they hold the same weights: it never compares
them. A bit that flips in the memory of one rank stays flipped there, and so does a learning rate that
is wrong on one rank; both spoil the gradients of all. The loss hardly shows it. The bits do: a digest
of each tensor, 8 bytes, compared over all ranks after each step, names the step, the rank and the
tensor. One tensor hints at memory, all tensors hint at a setting of that rank. The majority is right.

    torchrun --standalone --nproc-per-node 4 lessons/29_silent_errors.py
    paceline run -n 2 --max-restarts 0 lessons/29_silent_errors.py paceline name=silent epochs=1 batch.global_size=64 checkpoint.every=4steps    fails: at the next save

Expect: three losses that differ by less than 0.01, and other bits on rank 3 after step 10. The last command
flips the bit under `paceline.Run`: before it saves, it compares all ranks, and keeps no spoiled
checkpoint. A fault that hits all ranks alike needs a second run to compare with: `paceline verify`.
Time: about 25 s on 2 cores.
New since lesson 6: `inject` flips `BIT` or changes a rate in `BAD_STEP`; `digests` and `odd_ones` find it.
`main` trains an epoch with each of the `FAULTS`, so `EPOCHS` and `accuracy` are gone; `under_paceline`.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, RATE, BAD_STEP, BIT, FAULTS = 64, 0.05, 10, 20, ("none", "bit", "rate")


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


def inject(fault: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On this rank only: flip a bit of one weight, or raise the learning rate by one percent."""
    if fault == "bit":
        bits = model[2].weight.detach().view(-1).view(torch.int32)  # the same memory, as integers
        bits[100] ^= 1 << BIT
    if fault == "rate":
        optimizer.param_groups[0]["lr"] *= 1.01


def digests(model: nn.Module) -> Tensor:
    """Return the first 8 bytes of a SHA-256 of each tensor, as integers."""
    found = []
    for parameter in model.parameters():
        content = parameter.detach().cpu().numpy().tobytes()
        found.append(int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True))
    return torch.tensor(found)


def odd_ones(mine: Tensor, size: int) -> list[tuple[int, int]]:
    """Return (rank, tensor) wherever a rank has another digest than most ranks."""
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine)
    table = torch.stack(rows)
    return [(rank, tensor) for rank, tensor in (table != table.mode(0).values).nonzero().tolist()]


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    (images, labels), _ = embedded_digits()
    for fault in FAULTS:
        torch.manual_seed(0)  # the same initial weights on every rank
        model = DistributedDataParallel(make_model().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        total, mine = torch.zeros(1, device=device), share_of(rank, size, len(images), epoch=0)
        seen = "all ranks hold the same bits"
        for step, batch in enumerate(mine.split(BATCH // size), 1):
            if step == BAD_STEP and rank == size - 1:
                inject(fault, model.module, optimizer)
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
            odd = odd_ones(digests(model).to(device), size)
            if odd and seen.startswith("all"):
                names = [name for name, _ in model.module.named_parameters()]
                where = f"rank {odd[0][0]} differs in {len(odd)} of {len(names)} tensors"
                seen = f"after step {step} {where}, first in {names[odd[0][1]]}"
        dist.all_reduce(total)
        if rank == 0:
            print(f"fault {fault}: loss {total.item() / (len(mine) * size):.4f}, {seen}")
    dist.destroy_process_group()


def under_paceline() -> None:
    """Train under `paceline.Run`, with the flipped bit."""
    sys.argv.remove("paceline")  # the other arguments are settings
    with paceline.Run(paceline.config_from_argv()) as run:
        model = run.model(make_model())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
        for step in run.steps(embedded_digits()[0]):
            if step.index == BAD_STEP and run.world.rank == run.world.size - 1:
                inject("bit", model, optimizer)
            run.update(optimizer, lambda lane: cross_entropy(model(lane[0]), lane[1]), step)


if __name__ == "__main__":
    under_paceline() if "paceline" in sys.argv else main()
