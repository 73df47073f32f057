"""A GPT that learns to write, byte by byte. `paceline train gpt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.config import BatchConfig, LrConfig, RunConfig
from paceline.recipes.corpus import text_from_shards, text_in_memory
from paceline.recipes.gpt_model import GPT, SHAPES, Design


@dataclass(frozen=True)
class GptConfig(RunConfig):
    """A GPT on text."""

    name: str = "gpt"
    epochs: int = 1
    steps: int = 300
    clip_norm: float = 1.0
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_size=32, lanes=4))
    lr: LrConfig = field(
        default_factory=lambda: LrConfig(
            base=3e-3, reference_batch=32, schedule="cosine", warmup_samples=640, final=0.1
        )
    )
    size: Literal["nano", "mini", "124M", "350M", "774M", "1.5B"] = "nano"
    """How large the model is."""
    length: int = 128
    """Tokens of a row: how far back the model looks."""
    tokens: int = 256
    """How many different tokens there are: 256 for bytes."""
    positions: Literal["learned", "rotary"] = "learned"
    """How the model knows places: a vector for each, or queries and keys that are turned."""
    activation: Literal["gelu", "relu2"] = "gelu"
    """Between the two linear layers: GELU, or the square of the positive part."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm."""
    bias: bool = True
    """Whether linear layers and norms have biases."""
    dropout: float = 0.0
    """Share of numbers that are dropped."""
    recompute: bool = False
    """Compute each block again in backward instead of keeping what it computed: less memory, a third more work."""
    weight_decay: float = 0.1
    """Decay of the weights of matrices; biases and norms have none."""
    data: Literal["text", "shards"] = "text"
    """Bytes of text in memory, or sets of shards that stream."""
    data_folder: str = ""
    """A file or folder of text, or the folder or address of the sets `train` and `test`; empty: Python's own modules."""


def design_of(config: GptConfig) -> Design:
    """Return what the model is made of."""
    names = ("tokens", "length", "positions", "activation", "norm", "bias", "dropout", "recompute")
    return Design(SHAPES[config.size], **{name: getattr(config, name) for name in names})


def build_optimizer(model: nn.Module, config: GptConfig) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    matrices = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=paceline.scaled_lr(config), betas=(0.9, 0.95), fused=fused)


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of all places."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def read_text(config: GptConfig) -> tuple[Any, Any]:
    """Return rows to train on and rows held out, from where the config says."""
    if config.data == "shards":
        return text_from_shards(config.data_folder, config)
    return text_in_memory(config.data_folder, config.length)


def main(config: GptConfig) -> None:
    """Train, and report the loss on rows that were held out."""
    train, test = read_text(config)
    with paceline.join(config) as world:
        gpt = GPT(design_of(config))
        model = paceline.parallelize(gpt, world, config)
        optimizer = build_optimizer(model, config)
        batches = paceline.Batches(train, config, world)
        paceline.Trainer(world, model, optimizer, batches, token_loss, config, evaluation=test).run()


if __name__ == "__main__":
    main(paceline.config_from_argv(GptConfig, positional=("steps", "checkpoint.every")))
