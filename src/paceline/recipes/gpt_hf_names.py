"""Which tensor of a GPT-2 is which in the files of Hugging Face, config.json and model.safetensors, and what these may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.recipes.gpt_model import Design

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX, HEAD, EMBEDDING = "transformer.", "lm_head.weight", "wte.weight"
_SHOWN = 4  # problems of one file

# What config.json may say of what our GPT does in one way only; the first is meant where it says nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class Weight(NamedTuple):
    """One tensor, under our name and theirs."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """With us; theirs is the other way round where it is turned."""
    transposed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape with them."""
        return self.shape[::-1] if self.transposed else self.shape


def weights_of(design: Design) -> Iterator[Weight]:
    """Yield all tensors of a GPT-2."""
    width = design.shape.embedding_dim
    yield Weight("embedding.weight", EMBEDDING, (design.vocab_size, width))
    yield Weight("position.weight", "wpe.weight", (design.context_length, width))
    yield from _norm("norm", "ln_f", width)
    for layer in range(design.shape.layers):
        ours, theirs = f"blocks.{layer}.", f"h.{layer}."
        yield from _norm(f"{ours}norm1", f"{theirs}ln_1", width)
        yield from _norm(f"{ours}norm2", f"{theirs}ln_2", width)
        yield from _linear(f"{ours}qkv", f"{theirs}attn.c_attn", 3 * width, width)
        yield from _linear(f"{ours}out", f"{theirs}attn.c_proj", width, width)
        yield from _linear(f"{ours}up", f"{theirs}mlp.c_fc", 4 * width, width)
        yield from _linear(f"{ours}down", f"{theirs}mlp.c_proj", width, 4 * width)


def _norm(ours: str, theirs: str, width: int) -> list[Weight]:
    return [Weight(f"{ours}.{part}", f"{theirs}.{part}", (width,)) for part in ("weight", "bias")]


def _linear(ours: str, theirs: str, rows: int, columns: int) -> list[Weight]:
    """Return the weights of a linear layer, which they keep as [in, out]."""
    weight = Weight(f"{ours}.weight", f"{theirs}.weight", (rows, columns), transposed=True)
    return [weight, Weight(f"{ours}.bias", f"{theirs}.bias", (rows,))]


def converted(value: Tensor, weight: Weight) -> Tensor:
    """Return a tensor the other way round, if it must be, as fp32 in memory of its own."""
    value = value.detach().to("cpu", torch.float32, copy=True)
    return value.t().contiguous() if weight.transposed else value.contiguous()


def differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Return what is missing, of another shape or too much, in words; empty: nothing."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems += [f"{name} is not in a GPT-2" for name in sorted(found) if name not in wanted]
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "; ".join(problems[:_SHOWN] + more)
