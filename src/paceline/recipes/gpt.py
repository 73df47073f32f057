"""Train a GPT on text, by bytes, characters or tokens."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.errors import ConfigError
from paceline.recipes.gpt_config import (
    GptConfig,
    design_of,
    load_initial_weights,
    shape_of,
    with_vocabulary,
)
from paceline.recipes.gpt_model import GPT, Block, HeadInput, flops_per_sequence
from paceline.recipes.gpt_text import VocabularySaver, load_text
from paceline.recipes.muon import Muon
from paceline.train.gpu_settings import with_gpu_settings

_COMPILED_WEIGHTS = (
    20e6  # in all blocks; a smaller model is trained before its compilation would end
)
_FP8_CAPABILITY = (8, 9)
_HAS_TRITON = find_spec("triton") is not None


def build_optimizer(model: nn.Module, config: GptConfig) -> torch.optim.Optimizer:
    """Return AdamW or Muon; only weight matrices decay."""
    if config.optimizer == "muon":
        return _muon(model, config)
    matrices = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=paceline.scaled_lr(config), betas=(0.9, 0.95), fused=fused)


def _muon(model: nn.Module, config: GptConfig) -> Muon:
    """Return Muon for the matrices of the blocks, AdamW for the rest.

    A qkv matrix is three matrices in one.
    """
    groups: dict[str, dict[str, Any]] = {
        "qkv": {"params": [], "rule": "muon", "pieces": 3, "weight_decay": config.weight_decay},
        "matrices": {"params": [], "rule": "muon", "weight_decay": config.weight_decay},
        "embeddings": {"params": [], "weight_decay": config.weight_decay},
        "vectors": {"params": []},
    }
    for name, value in model.named_parameters():
        if value.dim() < 2:
            group = "vectors"
        elif not name.startswith("blocks."):
            group = "embeddings"
        else:
            group = "qkv" if name.endswith("qkv.weight") else "matrices"
        groups[group]["params"].append(value)
    return Muon(groups.values(), paceline.scaled_lr(config))


def token_loss(logits: Tensor | HeadInput, target: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions."""
    if not (_HAS_TRITON and target.is_cuda):
        assert isinstance(logits, Tensor)
        return cross_entropy(logits.flatten(0, 1), target.flatten())
    # Imported here: a function that is not to be compiled imports torch's compiler.
    from paceline.recipes.gpt_gpu_losses import fp8_head_loss, fused_loss

    if isinstance(logits, HeadInput):
        found: Tensor = fp8_head_loss(*logits, target.flatten())
        return found
    loss: Tensor = fused_loss(logits.flatten(0, 1), target.flatten())
    return loss


def _refuse_fp8_head(device: str) -> None:
    """Raise if the output layer cannot be computed in fp8 here."""
    capability = (0, 0) if device == "cpu" else torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY or not _HAS_TRITON:
        what = "a CPU" if device == "cpu" else f"compute capability {capability[0]}.{capability[1]}"
        raise ConfigError(
            f"fp8_head needs a GPU of compute capability 8.9 (L4, H100) or newer with Triton; this is {what}",
            fix="remove fp8_head",
        )


def for_device(config: GptConfig) -> GptConfig:
    """Return the settings of the command line with what suits a GPU, if there is one."""
    shape = shape_of(config)
    weights = 12 * shape.layers * shape.embedding_dim**2
    return with_gpu_settings(config, compiles=weights >= _COMPILED_WEIGHTS)


def main(config: GptConfig) -> None:
    """Train, and report the loss on held-out sequences."""
    config, weights = load_initial_weights(config)
    saver = VocabularySaver(config)
    with paceline.Run(config, sinks=[saver]) as run:
        if config.fp8_head:
            _refuse_fp8_head(run.device)
        text = load_text(config, run.world)
        saver.vocabulary = text.vocabulary
        run.config = config = with_vocabulary(config, text.vocabulary)
        gpt = GPT(design_of(config))
        if weights is not None:
            gpt.load_state_dict(weights)
        parameters = sum(value.numel() for value in gpt.parameters())
        model = run.model(gpt, wrap=(Block,))
        optimizer = run.optimizer(build_optimizer(model, config))
        paceline.Trainer(
            run, model, optimizer, text.train, token_loss,
            evaluation=text.test,
            flops_per_sample=flops_per_sequence(gpt.design, parameters),
        ).fit()  # fmt: skip


if __name__ == "__main__":
    main(for_device(paceline.config_from_argv(GptConfig, positional=("steps", "checkpoint.every"))))
