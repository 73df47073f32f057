"""Lesson 26: ZeRO in bytes.

With Adam each parameter takes 16 bytes: 4 for the weight, 4 for its gradient, 8 for the optimizer
state. With DDP every rank holds all of them. ZeRO cuts them into shards, one per rank, in stages.
Stage 1 shards the optimizer state: each rank updates its shard of the weights, and gathers the others.
Stage 2 shards the gradients, too: a reduce-scatter gives each rank the mean of its own shard only.
Stage 3 shards the weights: they are gathered for a step, and freed after it. Stage 0 is lesson 4.

    torchrun --standalone --nproc-per-node 4 lessons/26_zero.py

Expect: of 16 bytes per parameter, four ranks hold 16, 10, 7 and 4 each, and the losses are the same up
to rounding. Here all weights are one vector, gathered at once; FSDP (lesson 22) is stage 3 unit by
unit, so that few of them are whole at a time.
Time: about 15 s on 2 cores.
New since lesson 4: `Zero` holds the weights as one vector, and replaces `average_gradients` and
`accuracy`; in `main` every stage trains for an epoch, with Adam and its `RATE`, instead of `EPOCHS`.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parameters_to_vector

from paceline.recipes.digits import embedded_digits  # 1,797 digits in the package: no download

BATCH, RATE = 64, 0.01


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


class Zero:
    """A model whose weights are one vector: whole on every rank, or a shard on each."""

    def __init__(self, stage: int, rank: int, size: int, device: torch.device) -> None:
        model = make_model()
        vector = parameters_to_vector(model.parameters()).detach().to(device)
        whole = pad(vector, (0, -len(vector) % size))  # so that all shards have the same length
        shard = whole.chunk(size)[rank]  # a view: it takes no memory of its own
        self.stage, self.rank, self.size = stage, rank, size
        self.model = model.to("meta")  # names and shapes, without weights
        self.weights = shard.clone() if stage == 3 else whole
        self.updated = shard if stage in {1, 2} else self.weights
        self.optimizer = torch.optim.Adam([self.updated], lr=RATE)

    def gather(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks as one vector."""
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Make one update; return the loss of this rank's samples."""
        whole = self.gather(self.weights) if self.stage == 3 else self.weights
        vector, parameters, begin = whole.detach().requires_grad_(), {}, 0
        for name, like in self.model.named_parameters():
            parameters[name] = vector[begin : begin + like.numel()].view(like.shape)
            begin += like.numel()
        loss = cross_entropy(functional_call(self.model, parameters, (images,)), labels)
        [gradient] = torch.autograd.grad(loss / self.size, vector)
        if self.stage < 2:
            dist.all_reduce(gradient)
            self.gradient = gradient
        else:
            self.gradient = torch.empty_like(self.updated)
            dist.reduce_scatter(self.gradient, list(gradient.chunk(self.size)))
        own = self.gradient.chunk(self.size)[self.rank] if self.stage == 1 else self.gradient
        self.updated.grad = own
        self.optimizer.step()
        if self.stage in {1, 2}:
            self.weights.copy_(self.gather(self.updated))
        return loss.item()

    def bytes_held(self) -> tuple[int, int, int]:
        """Return the bytes of weights, gradients and optimizer state on this rank between steps."""
        [state] = self.optimizer.state.values()
        moments = state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
        return self.weights.nbytes, self.gradient.nbytes, moments


def main() -> None:
    """Train with each stage."""
    device = pick_device()
    rank, size = join(device)
    (images, labels), _ = embedded_digits()
    for stage in range(4):
        torch.manual_seed(0)  # the same initial weights on every rank
        model, total = Zero(stage, rank, size, device), torch.zeros(1, device=device)
        mine = share_of(rank, size, len(images), epoch=0)
        for batch in mine.split(BATCH // size):
            total += model.step(images[batch].to(device), labels[batch].to(device)) * len(batch)
        dist.all_reduce(total)
        loss, held = total.item() / (len(mine) * size), model.bytes_held()
        if rank == 0:
            each = "weights {:,}, gradients {:,}, optimizer state {:,}".format(*held)
            print(f"stage {stage}: {each}, in all {sum(held):,} bytes per rank; loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
