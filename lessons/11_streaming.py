"""Lesson 11: Stream samples from disk.

A dataset that does not fit into memory is read chunk by chunk. Disks read whole chunks fast and
scattered samples slowly; so the chunks are shuffled, and then the samples within a chunk. All ranks
must take the same number of steps, or one waits in a collective forever (lesson 20): so all chunks
have the same size.

    python lessons/11_streaming.py create                                   writes lesson-11/
    torchrun --standalone --nproc-per-node 2 lessons/11_streaming.py

Expect: nearly the losses of lesson 6, from files. The price: samples of one chunk stay close
together, and an incomplete chunk or batch is dropped. `paceline data pack` and
`paceline.open_dataset` mix many chunks, drop nothing, verify every byte, and resume anywhere.
Time: about 11 s on 2 cores.
New since lesson 6: `create` and `stream` replace `share_of`, with their `CHUNK` and `FOLDER`, and
their use in `main`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE = 3, 64, 0.05
CHUNK, FOLDER = 100, Path("lesson-11")


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


def create(folder: Path) -> None:
    """Write the training set as files of 100 samples, so that no program must hold all of it."""
    (images, labels), _ = embedded_digits()
    folder.mkdir(exist_ok=True)
    for number in range(len(images) // CHUNK):
        chunk = slice(number * CHUNK, (number + 1) * CHUNK)
        save_file(
            {"images": images[chunk], "labels": labels[chunk]}, folder / f"{number:04d}.safetensors"
        )


def stream(folder: Path, rank: int, size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches of an epoch: whole chunks, shuffled, and shuffled within."""
    draw, each = torch.Generator().manual_seed(epoch), BATCH // size
    chunks = sorted(folder.glob("*.safetensors"))
    if len(chunks) < size:
        sys.exit(f"{len(chunks)} chunks for {size} ranks: run `create`, and start fewer ranks")
    complete = len(chunks) - len(chunks) % size  # the same number of chunks for each rank
    order = torch.randperm(len(chunks), generator=draw)[:complete]
    images, labels = torch.empty(0), torch.empty(0, dtype=torch.long)  # read, but not yet yielded
    for number in order[rank::size].tolist():
        chunk, mixed = load_file(chunks[number]), torch.randperm(CHUNK, generator=draw)
        images = torch.cat([images, chunk["images"][mixed]])
        labels = torch.cat([labels, chunk["labels"][mixed]])
        while len(labels) >= each:
            yield images[:each], labels[:each]
            images, labels = images[each:], labels[each:]


def main() -> None:
    """Train, or write the files."""
    if "create" in sys.argv:
        create(FOLDER)
        return
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    _, held_out = embedded_digits()
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        total, seen = 0.0, 0
        for images, labels in stream(FOLDER, rank, size, epoch):
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, seen = total + loss.item() * len(labels), seen + len(labels)
        print(f"rank {rank}, epoch {epoch + 1}: {seen} samples, loss {total / seen:.4f}")
    test_images, test_labels = (part.to(device) for part in held_out)
    print(f"rank {rank}: accuracy {accuracy(model, test_images, test_labels):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
