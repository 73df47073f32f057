"""How does each contender train GPT-2 124M on one GPU? Rows of 1,024 random tokens, bf16, AdamW.

Run by gpt.py as `gpt_contenders.py NAME ROWS STEPS`; prints the seconds of each step but the first few.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from paceline.recipes.gpt_model import GPT, SHAPES, Block, Design

LENGTH, TOKENS, WORDS, RATE = 1024, 50_304, 50_257, 6e-4
EPOCH = (
    128  # steps; no epoch ends while time is taken, because a plain loop has nothing to report then
)
WARM = 66  # a captured step is compared with an eager one in updates 2, 4, ... 64, 256, 1,024, 4,096, then every 8,192


def rows(count: int) -> Tensor:
    """Return random rows, the same for all."""
    return torch.randint(
        0, WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    ).to(torch.int32)


def timed(step: Callable[[Any], object], batches: Any, steps: int) -> float:
    """Return the mean seconds of a step, once all is warm."""
    for number, batch in enumerate(batches):
        if number == WARM:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        if number == WARM + steps:
            break
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def with_transformers(count: int, steps: int, *, compiled: bool) -> float:
    """Train Hugging Face's GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_float32_matmul_precision("high")
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).cuda()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    data = rows(count).cuda().long()[:, :LENGTH]

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step, (data for _ in range(WARM + steps + 1)), steps)


class PlainBlock(Block):
    """A transformer layer of torch's own operators."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        hidden = hidden + linear(self._attention(self.norm1(hidden)), self.out.weight)
        inside = gelu(linear(self.norm2(hidden), self.up.weight), approximate="tanh")
        return hidden + linear(inside, self.down.weight)

    def _attention(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = linear(hidden, self.qkv.weight).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(1, 2).reshape(batch, length, width)


class Plain(GPT):
    """The same model, added up in fp32 as autocast leaves it, with torch's loss inside: the way of tutorials, and of nanoGPT."""

    def __init__(self, design: Design) -> None:
        super().__init__(design)
        self.blocks = nn.ModuleList(PlainBlock(design) for _ in self.blocks)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        assert self.position is not None
        hidden = self.drop(self.embedding(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        scores = linear(self.norm(hidden), self.embedding.weight)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def by_hand(count: int, steps: int) -> float:
    """Train as tutorials do: compiled, autocast, fused AdamW, rows from memory of the host; nothing captured."""
    torch.set_float32_matmul_precision("high")
    model = Plain(Design(SHAPES["124M"], TOKENS, LENGTH, bias=False)).cuda()
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    data = rows(EPOCH * count)

    def step(number: int) -> None:
        tokens = data[number % EPOCH * count :][:count].long().pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, range(WARM + steps + 1), steps)


def settings(count: int) -> list[str]:
    """Return what the recipe is told in every way to run it."""
    model = f"device=cuda size=124M context_length={LENGTH} vocab_size={TOKENS} bias=false batch.global_size={count} batch.lanes=1"
    return [*model.split(), f"lr.base={RATE}", "precision=bf16", "capture=true", "compile=true"]


class _Measured(Exception):
    """Leaves a run without saving it."""


def text_rows(count: int) -> Any:
    """Return rows of tokens for the GPT recipe, which predicts each next token."""
    from paceline.data.reading.source import TensorSource
    from paceline.data.reading.transform import Transformed
    from paceline.recipes.corpus import next_tokens

    return Transformed(TensorSource(rows(EPOCH * count)), next_tokens)


def with_paceline(count: int, steps: int, *words: str) -> float:
    """Train the GPT recipe's model in a loop over `paceline.Run`."""
    import paceline
    from paceline.config import config_from_words
    from paceline.recipes.gpt import GptConfig, build_optimizer, design_of, token_loss

    os.chdir(tempfile.mkdtemp(prefix="paceline-gpu-"))
    config = config_from_words(GptConfig, [*settings(count), "steps=100000", *words])
    seconds = 0.0
    with contextlib.suppress(_Measured), paceline.Run(config) as run:
        model = run.model(GPT(design_of(config)))
        optimizer = run.optimizer(build_optimizer(model, config))

        def loss(batch: Any) -> Tensor:
            tokens, target = batch
            return token_loss(model(tokens), target)

        def update(step: Any) -> None:
            run.update(optimizer, loss, step)

        seconds = timed(update, run.steps(text_rows(count)), steps)
        raise _Measured
    return seconds


def with_trainer(count: int, steps: int, *words: str) -> float:
    """Train the same with `paceline.Trainer`; the time is that between two of its events."""
    from pathlib import Path

    import paceline
    from paceline.config import config_from_words
    from paceline.recipes import gpt

    os.chdir(tempfile.mkdtemp(prefix="paceline-gpu-"))
    own = [f"steps={2 * steps}", f"log.every_steps={steps}", "checkpoint.every=end"]
    config = config_from_words(gpt.GptConfig, [*settings(count), *own, *words])
    with paceline.Run(config) as run:
        model = run.model(gpt.GPT(gpt.design_of(config)))
        optimizer = run.optimizer(gpt.build_optimizer(model, config))
        paceline.Trainer(run, model, optimizer, text_rows(count), gpt.token_loss).fit()
    lines = [
        json.loads(line)
        for line in Path("runs/gpt/events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return count / [line for line in lines if line["event"] == "StepDone"][-1]["samples_per_s"]


CONTENDERS: dict[str, Callable[[int, int], float]] = {
    "paceline": with_paceline,
    "paceline-free": lambda count, steps: with_paceline(count, steps, "exact=false"),
    "paceline-trainer": with_trainer,
    "paceline-fp8": lambda count, steps: with_paceline(
        count, steps, "exact=false", "fp8_head=true"
    ),
    "hand-compiled": by_hand,
    "transformers": lambda count, steps: with_transformers(count, steps, compiled=False),
    "transformers-compiled": lambda count, steps: with_transformers(count, steps, compiled=True),
}


if __name__ == "__main__":
    name, count, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds = CONTENDERS[name](count, steps)
    memory = torch.cuda.max_memory_allocated()
    print("\n" + json.dumps({"tokens_per_s": count * LENGTH / seconds, "memory_gb": memory / 1e9}))
