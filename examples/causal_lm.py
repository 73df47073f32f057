"""Train a transformers language model, which computes its own loss, on the bytes of this file."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

LENGTH = 48


@dataclass(frozen=True)
class Config(paceline.RunConfig):
    name: str = "causal-lm"


def windows() -> Tensor:
    """Return overlapping pieces of this file, [pieces, LENGTH]."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return text.unfold(0, LENGTH, 2).contiguous()


def main(config: Config) -> None:
    """Train, and write a few words."""
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with paceline.Run(config) as run:
        model = run.model(LlamaForCausalLM(sizes))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

        def loss(batch: tuple[Tensor]) -> Tensor:
            (ids,) = batch
            found: Tensor = model(input_ids=ids, labels=ids).loss
            return found

        for step in run.steps((windows(),), epochs=6):
            run.update(optimizer, loss, step, clip=1.0)

        start = torch.tensor([list(b"import ")], device=run.device)
        ids = model.eval().generate(start, max_new_tokens=20, do_sample=False, pad_token_id=0)
        run.print(repr(bytes(ids[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main(paceline.config_from_argv(Config))
