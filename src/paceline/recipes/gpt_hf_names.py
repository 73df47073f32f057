"""Names and layouts of GPT-2 tensors in Hugging Face files, and the values of config.json that are supported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.recipes.gpt_model import Design

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX, HEAD, EMBEDDING = "transformer.", "lm_head.weight", "wte.weight"
_SHOWN = 4  # problems per message

# Supported values in config.json; the first is the default.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class Weight(NamedTuple):
    """One tensor, under our name and that of Hugging Face."""

    name: str
    hf_name: str
    shape: tuple[int, ...]
    """In our layout."""
    transposed: bool = False

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape in the Hugging Face layout."""
        return self.shape[::-1] if self.transposed else self.shape


def weights_of(design: Design) -> Iterator[Weight]:
    """Yield all tensors of a GPT-2."""
    width = design.shape.embedding_dim
    yield Weight("embedding.weight", EMBEDDING, (design.vocab_size, width))
    yield Weight("position.weight", "wpe.weight", (design.context_length, width))
    yield from _norm("norm", "ln_f", width)
    for layer in range(design.shape.layers):
        name, hf_name = f"blocks.{layer}.", f"h.{layer}."
        yield from _norm(f"{name}norm1", f"{hf_name}ln_1", width)
        yield from _norm(f"{name}norm2", f"{hf_name}ln_2", width)
        yield from _linear(f"{name}qkv", f"{hf_name}attn.c_attn", 3 * width, width)
        yield from _linear(f"{name}out", f"{hf_name}attn.c_proj", width, width)
        yield from _linear(f"{name}up", f"{hf_name}mlp.c_fc", 4 * width, width)
        yield from _linear(f"{name}down", f"{hf_name}mlp.c_proj", width, 4 * width)


def _norm(name: str, hf_name: str, width: int) -> list[Weight]:
    return [Weight(f"{name}.{part}", f"{hf_name}.{part}", (width,)) for part in ("weight", "bias")]


def _linear(name: str, hf_name: str, rows: int, columns: int) -> list[Weight]:
    """Return weight and bias of a linear layer, which Hugging Face stores as Conv1D: [in, out]."""
    weight = Weight(f"{name}.weight", f"{hf_name}.weight", (rows, columns), transposed=True)
    return [weight, Weight(f"{name}.bias", f"{hf_name}.bias", (rows,))]


def converted(value: Tensor, weight: Weight) -> Tensor:
    """Return an fp32 copy on the CPU, transposed where the layouts differ."""
    value = value.detach().to("cpu", torch.float32, copy=True)
    return value.t().contiguous() if weight.transposed else value.contiguous()


def differences(
    wanted: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the missing, differently shaped and unknown tensors as a sentence.

    Empty if there are none.
    """
    problems = [f"{name} is missing" for name in wanted if name not in actual]
    for name, shape in wanted.items():
        if name in actual and actual[name] != shape:
            problems.append(f"{name} is {list(actual[name])} instead of {list(shape)}")
    problems += [f"{name} is not in a GPT-2" for name in sorted(actual) if name not in wanted]
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "; ".join(problems[:_SHOWN] + more)
