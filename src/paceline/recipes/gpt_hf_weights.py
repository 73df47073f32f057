"""Read GPT-2 weights in the Hugging Face layout: config.json and model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import DataError
from paceline.recipes.gpt_hf_names import (
    CONFIG,
    EMBEDDING,
    HEAD,
    ONLY,
    PREFIX,
    WEIGHTS,
    converted,
    differences,
    weights_of,
)
from paceline.recipes.gpt_model import Design, Shape
from paceline.safe_open import read_json

_BUFFERS = (".attn.bias", ".attn.masked_bias")  # attention masks, saved by older versions
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SAVE = "save a GPT2LMHeadModel with transformers: model.save_pretrained(FOLDER)"


def read_gpt2(place: Path) -> tuple[Design, dict[str, Tensor]]:
    """Return design and state dict of a GPT-2 for `GPT`, from its folder or its safetensors file."""
    if not place.exists():
        raise DataError(f"there is no folder of weights at {place}", fix=_SAVE)
    path = place / WEIGHTS if place.is_dir() else place
    if path.suffix != ".safetensors" or not path.is_file():
        raise _no_weights(path)
    design, tied = _design(path.with_name(CONFIG))
    try:
        with safe_open(path, framework="pt") as file:
            return design, _tensors(file, path, design, tied=tied)
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path} as a safetensors file: {error}", fix=_SAVE) from error


def _tensors(file: Any, path: Path, design: Design, *, tied: bool) -> dict[str, Tensor]:
    """Return the tensors of an open file under our names.

    Raise unless names and shapes match exactly.
    """
    named = {name.removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118 - not a mapping
    shapes = {name: tuple(file.get_slice(full).get_shape()) for name, full in named.items()}
    for name in list(shapes):
        if name.endswith(_BUFFERS) or name == HEAD:
            del shapes[name]
    weights = list(weights_of(design))
    expected = {weight.hf_name: weight.hf_shape for weight in weights}
    if problems := differences(expected, shapes):
        raise DataError(f"{path} does not match its {CONFIG}: {problems}", fix=_SAVE)
    _check_head(file, path, named, tied=tied)
    tensors = {}
    for weight in weights:
        value = file.get_tensor(named[weight.hf_name])
        if value.dtype not in _FLOATS:
            raise DataError(
                f"{weight.hf_name} in {path} has dtype {value.dtype}, not a float type", fix=_SAVE
            )
        tensors[weight.name] = converted(value, weight)
    return tensors


def _check_head(file: Any, path: Path, named: Mapping[str, str], *, tied: bool) -> None:
    """Raise if the output head is not tied to the embedding."""
    same = HEAD in named and torch.equal(
        file.get_tensor(named[HEAD]), file.get_tensor(named[EMBEDDING])
    )
    if not (same or (tied and HEAD not in named)):
        raise DataError(
            f"{HEAD} in {path} is not tied to the embedding",
            fix="use a GPT-2 with tie_word_embeddings",
        )


def _design(path: Path) -> tuple[Design, bool]:
    """Return the design in config.json, and whether the output head is tied to the embedding."""
    try:
        tree = read_json(path, links=True)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", fix=_SAVE) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", fix=_SAVE) from error
    if not isinstance(tree, dict) or tree.get("model_type") != "gpt2":
        kind = tree.get("model_type") if isinstance(tree, dict) else None
        raise DataError(f"{path} has model_type {kind!r} instead of 'gpt2'", fix=_SAVE)
    for name, values in ONLY.items():
        if tree.get(name, values[0]) not in values:
            raise DataError(
                f"{path} has {name}={tree[name]!r}, which is not supported",
                fix=f"use a model with {name}={' or '.join(map(repr, values))}",
            )
    layers, heads, width, tokens, length = (
        _count(tree, path, name)
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions")
    )
    if width % heads:
        raise DataError(
            f"{path} has n_embd={width}, which is not a multiple of n_head={heads}", fix=_SAVE
        )
    if tree.get("n_inner") not in (None, 4 * width):
        raise DataError(
            f"{path} has n_inner={tree['n_inner']!r}, which is not supported",
            fix=f"use a model with n_inner={4 * width}",
        )
    tied = tree.get("tie_word_embeddings", True) is True
    return Design(Shape(layers, heads, width), tokens, length), tied


def _count(tree: Mapping[str, Any], path: Path, name: str) -> int:
    value = tree.get(name)
    if type(value) is not int or value < 1:
        raise DataError(f"{path}: {name} must be at least 1, got {value!r}", fix=_SAVE)
    return value


def _no_weights(path: Path) -> DataError:
    """Return the error for weights that are missing, sharded or pickled."""
    fix = _SAVE
    if path.with_name(f"{WEIGHTS}.index.json").is_file():
        fix = 'save them as one file: model.save_pretrained(FOLDER, max_shard_size="100GB")'
    elif path.is_file() or path.with_name("pytorch_model.bin").is_file():
        fix = f"a pickle is never read; {_SAVE}"
    problem = f"{path} is not a safetensors file" if path.is_file() else f"there is no {path}"
    return DataError(problem, fix=fix)
