"""Lesson 22: Shard a GPT with FSDP.

With DDP every rank holds all weights, gradients and optimizer state. FSDP gives each rank a shard of
all three: the weights of a unit are gathered before it runs and freed after it; in backward the
gradients are averaged and sharded again. Ranks send more, and hold far less.

    torchrun --standalone --nproc-per-node 2 lessons/22_fsdp.py ddp    before
    torchrun --standalone --nproc-per-node 2 lessons/22_fsdp.py        after

Expect: the losses of lesson 21 both times, and half of the bytes on each of two ranks. Any number of
ranks that divides 16 works. `paceline train gpt parallel=fsdp` also keeps the same bits.
Time: about 26 s on 2 cores.
New since lesson 21: `fully_shard` in `main`, and `held_bytes` replaces `generate`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, LENGTH, WIDTH, HEADS, LAYERS, RATE = 60, 16, 64, 64, 4, 3, 5e-3


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


class Block(nn.Module):
    """One transformer layer: causal self-attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        hidden = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        rows, length, _ = values.shape
        qkv = self.qkv(self.norm1(values)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*qkv, is_causal=True)
        values = values + self.projection(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return values + self.mlp(self.norm2(values))


class Gpt(nn.Module):
    """Bytes in, scores of the next byte out, for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        values = self.token(text) + self.position(positions)
        return self.head(self.norm(self.blocks(values)))


def rows_of(text: Tensor, step: int, rank: int, size: int) -> Tensor:
    """Return this rank's rows of a step: all ranks draw the same offsets and split them."""
    generator = torch.Generator().manual_seed(step)
    offsets = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([text[offset : offset + LENGTH + 1] for offset in offsets[rank::size]])


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients and optimizer state on this rank."""
    values = [value for one in model.parameters() for value in (one, one.grad) if value is not None]
    for state in optimizer.state.values():
        values += [value for value in state.values() if torch.is_tensor(value)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.nbytes for value in local)


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    source = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    model = Gpt().to(device)
    if "ddp" in sys.argv:
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (size,))  # all ranks in one dimension
        for block in model.blocks:
            fully_shard(block, mesh=mesh)  # a unit: gathered before it runs, freed after it
        fully_shard(model, mesh=mesh)  # the rest: embeddings and head
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        rows = rows_of(text, step, rank, size).to(device)
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == 0 or (step + 1) % 20 == 0):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        held = held_bytes(model, optimizer)
        print(f"rank 0 of {size} holds {held:,} bytes: weights, gradients, optimizer state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
