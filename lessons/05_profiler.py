"""Lesson 5: Profile a training.

Where does the time of lesson 4 go? torch's profiler skips two steps, warms up for two and records
five. Open lesson-5.json in ui.perfetto.dev or chrome://tracing: the averaging begins only when
backward has ended, one parameter after the other, and everything else waits for it.

    torchrun --standalone --nproc-per-node 4 lessons/05_profiler.py

Expect: a table with average_gradients near the top; most of its time is waiting. `paceline profile`
does this for all ranks on one clock, and says in words where the time went.
Time: about 16 s on 2 cores.
New since lesson 4: the profiler in `main`.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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


def average_gradients(model: nn.Module, size: int) -> None:
    """Replace the gradients of every rank by their mean, so that all make the same update."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    (images, labels), held_out = embedded_digits()
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.profiler.schedule(wait=2, warmup=2, active=5, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule)
    profiler.start()
    for epoch in range(EPOCHS):
        total, mine = 0.0, share_of(rank, size, len(images), epoch)
        for batch in mine.split(BATCH // size):
            loss = cross_entropy(model(images[batch].to(device)), labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            with torch.profiler.record_function("average_gradients"):
                average_gradients(model, size)
            optimizer.step()
            total += loss.item() * len(batch)
            profiler.step()
        print(f"rank {rank}, epoch {epoch + 1}: {len(mine)} samples, loss {total / len(mine):.4f}")
    profiler.stop()
    if rank == 0:
        averages = profiler.key_averages()
        print(averages.table(sort_by="cpu_time_total", row_limit=8, max_name_column_width=40))
        profiler.export_chrome_trace("lesson-5.json")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"rank {rank}: accuracy {accuracy(model, test_images, test_labels):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
