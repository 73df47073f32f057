"""Lesson 35: Fine-tune with LoRA by hand.

Fine-tuning trains a model for a new task. Full fine-tuning trains all weights: all have gradients, and
all are in its checkpoint. LoRA freezes each matrix W and trains two thin ones beside it, y = (W + BA) x,
where A has 4 rows and B has 4 columns. B starts at zero, so the training starts at the base model. Only
A and B have gradients: DDP sends only those, and a checkpoint needs only those. Afterwards W + BA can
be one matrix again, as fast as W. Here a model that has learned digits learns their mirror images.

    torchrun --standalone --nproc-per-node 2 lessons/35_lora.py

Expect: LoRA trains, sends and saves about 3 % of the bytes of full fine-tuning, and its accuracy is a
little lower. Full fine-tuning forgets the old digits; without its adapters, the base model of LoRA has
the same bits as before. The frozen weights still take memory, and forward still uses them.
Time: about 20 s on 2 cores.
New since lesson 6: `Lora`, put into a model by `adapted`, with its `INNER` size; `make_model` has linear
layers only, of `WIDTH`; `send` counts bytes; `train` has the loop of `main`; other `EPOCHS` and `RATE`.
"""

import copy
import os

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

EPOCHS, BATCH, RATE, WIDTH, INNER = 5, 64, 0.02, 256, 4


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


def make_model() -> nn.Sequential:
    """Return a network of three linear layers."""
    first, second, third = nn.Linear(28 * 28, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), third)


class Lora(nn.Module):
    """A frozen linear layer, and a low-rank update of it that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(INNER, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, INNER))

    def forward(self, values: Tensor) -> Tensor:
        return self.base(values) + values @ self.a.T @ self.b.T


def adapted(model: nn.Sequential) -> nn.Sequential:
    """Return a model whose linear layers have adapters."""
    return nn.Sequential(*(Lora(one) if isinstance(one, nn.Linear) else one for one in model))


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


def send(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, as DDP does by itself, and count its bytes."""
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(dist.group.WORLD, bucket)


def train(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Train a model on all ranks; return how many bytes of gradients a rank sends per step."""
    rank, size, sent, steps = dist.get_rank(), dist.get_world_size(), [], 0
    trained = [one for one in model.parameters() if one.requires_grad]
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(sent, send)
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        for batch in share_of(rank, size, len(images), epoch).split(BATCH // size):
            loss = cross_entropy(wrapped(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    return sum(sent) // steps


def main() -> None:
    """Train a base model, then fine-tune it in two ways."""
    device = pick_device()
    rank, _ = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    images, labels, old, wanted = (one.to(device) for part in embedded_digits() for one in part)
    base = make_model().to(device)
    train(base, images, labels)
    for way in ("full", "LoRA"):
        model = copy.deepcopy(base) if way == "full" else adapted(copy.deepcopy(base)).to(device)
        before = accuracy(model, old.flip(3), wanted)
        sent = train(model, images.flip(3), labels)  # mirror images
        after = accuracy(model, old.flip(3), wanted)
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        count, saved = sum(one.numel() for one in trained.values()), len(save(trained))
        plain = nn.Sequential(*(one.base if isinstance(one, Lora) else one for one in model))
        is_same = all(map(torch.equal, plain.parameters(), base.parameters()))
        if rank == 0:
            print(f"{way}: {count:,} trained, {sent:,} bytes sent per step, {saved:,} bytes saved")
            print(f"{way}: mirror images {before:.3f} before, {after:.3f} after")
            state = "the bits of the base model" if is_same else "changed"
            print(f"{way}: old digits {accuracy(plain, old, wanted):.3f}, weights: {state}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
