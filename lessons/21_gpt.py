"""Lesson 21: Train a GPT with DDP.

The same loop on text: a small transformer reads the source of Python's own modules, byte by byte,
and learns to predict the next byte. It is data parallel like any other model: DDP does not care
what is inside.

    torchrun --standalone --nproc-per-node 2 lessons/21_gpt.py

Expect: the loss falls from 5.6 to below 3, and the generated text begins to look like words.
`paceline train gpt` is the full version. Any number of ranks that divides 16 works.
Time: about 12 s on 2 cores.
New since lesson 6: `Block` and `Gpt` replace `make_model`, with their sizes `LENGTH`, `WIDTH`,
`HEADS` and `LAYERS`; `rows_of` replaces `share_of`, `generate` replaces `accuracy`, `STEPS` replaces
`EPOCHS`; another `BATCH` and `RATE`; and `main`, with AdamW.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def generate(model: nn.Module, length: int) -> str:
    """Return text sampled from the model after the prompt `def `."""
    text, draw = torch.tensor([list(b"def ")]), torch.Generator().manual_seed(0)
    text = text.to(next(model.parameters()).device)
    with torch.no_grad():
        for _ in range(length):
            chances = model(text[:, -LENGTH:])[:, -1].softmax(-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=draw)
            text = torch.cat([text, drawn.to(text.device)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same initial weights on every rank
    source = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    model = DistributedDataParallel(Gpt().to(device))
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
        print(generate(model.module, 120))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
