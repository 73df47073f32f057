"""Lesson 21: a GPT with DDP.

The same loop on text: a small transformer reads the source of Python's own modules, byte after byte, and
learns which byte comes next. It is data parallel like any other model: DDP neither knows nor cares what is
inside.

    torchrun --standalone --nproc-per-node 2 lessons/21_gpt.py

Expect: the loss falls from 5.6 to below 3, and what it writes begins to look like words. `paceline train gpt`
is the grown-up one. Any number of ranks that divides 16 will do.
Time: about 12 s on 2 cores.
New since lesson 6: `Block` and `Gpt` in place of `make_model`, with their sizes `LENGTH`, `WIDTH`, `HEADS` and `LAYERS`; `rows_of` in place
of `share_of`, `write` of `accuracy`, `STEPS` of `EPOCHS`; another `BATCH` and `RATE`; and `main`, with AdamW.
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
    """Return this process's own GPU, or the CPU if there are not enough of them."""
    local_rank, here = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if torch.cuda.device_count() < here:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)  # or what names no device would take GPU 0 in every process
    return torch.device("cuda", local_rank)


def join(device: torch.device) -> tuple[int, int]:
    """Meet the other processes; return who we are, and how many. torchrun tells both through the environment."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    """One layer: each place looks at those before it, then thinks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before_looking, self.before_thinking = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ask, self.answer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, values: Tensor) -> Tensor:
        rows, length, _ = values.shape
        asked = (
            self.ask(self.before_looking(values))
            .view(rows, length, 3, HEADS, -1)
            .permute(2, 0, 3, 1, 4)
        )
        seen = (
            scaled_dot_product_attention(*asked, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, WIDTH)
        )
        values = values + self.answer(seen)
        return values + self.think(self.before_thinking(values))


class Gpt(nn.Module):
    """Bytes in, and for each place what the next one may be."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        values = self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))
        return self.head(self.last(self.blocks(values)))


def rows_of(text: Tensor, step: int, rank: int, size: int) -> Tensor:
    """Return this rank's rows of a step; all ranks draw the same places, and each takes its own."""
    places = torch.randint(
        len(text) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    return torch.stack([text[place : place + LENGTH + 1] for place in places[rank::size]])


def write(model: nn.Module, length: int) -> str:
    """Return what the model goes on to write after `def `."""
    text, draw = torch.tensor([list(b"def ")]), torch.Generator().manual_seed(0)
    text = text.to(next(model.parameters()).device)
    with torch.no_grad():
        for _ in range(length):
            chances = model(text[:, -LENGTH:])[:, -1].softmax(-1).cpu()
            text = torch.cat(
                [text, torch.multinomial(chances, 1, generator=draw).to(text.device)], 1
            )
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train."""
    device = pick_device()
    rank, size = join(device)
    torch.manual_seed(0)  # the same first weights everywhere
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
        print(write(model.module, 120))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
