"""How GPT-2's weights are laid out in the files of Hugging Face: config.json, and model.safetensors beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.errors import ConfigError, DataError
from paceline.recipes.gpt_model import Design, Shape
from paceline.rundir import make_private, write_whole, writing_to

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_PREFIX, _HEAD, _EMBEDDING = "transformer.", "lm_head.weight", "wte.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # masks, which older versions saved
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_LIKE_GPT2 = {"positions": "learned", "activation": "gelu", "norm": "layer", "bias": True}
_SAVE = "give what transformers has saved of a GPT2LMHeadModel: model.save_pretrained(FOLDER)"
_SHOWN = 4  # problems of one file

# What config.json may say of what our GPT does in one way only; the first is meant where it says nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class _Weight(NamedTuple):
    """One tensor, under our name and theirs."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """With us; theirs is the other way round where it is turned."""
    turned: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.turned else self.shape


def read_hub(place: Path) -> tuple[Design, dict[str, Tensor]]:
    """Return the design and the weights of a GPT-2, from its folder or from its file of weights, for `GPT`."""
    folder = place if place.is_dir() else place.parent
    design, tied = _design(folder / CONFIG)
    path = folder / WEIGHTS if place.is_dir() else place
    if path.suffix != ".safetensors" or not path.is_file():
        raise _no_weights(path)
    try:
        with safe_open(path, framework="pt") as file:
            return design, _tensors(file, path, design, tied=tied)
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path} as a safetensors file: {error}", fix=_SAVE) from error


def write_hub(design: Design, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of a `GPT` so that `GPT2LMHeadModel.from_pretrained(folder)` loads them."""
    odd = [f"{name}={getattr(design, name)}" for name, value in _LIKE_GPT2.items() if getattr(design, name) != value]
    if odd:
        raise ConfigError(
            f"GPT-2 has no {', '.join(odd)}", fix="train with positions=learned activation=gelu norm=layer bias=true"
        )
    weights = list(_weights(design))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if problems := _differences({weight.ours: weight.shape for weight in weights}, shapes):
        raise ConfigError(f"these are not the weights of that design: {problems}", fix="give model.design and its own")
    with writing_to(folder, elsewhere="name another folder"):
        make_private(folder)
        if there := [name for name in (CONFIG, WEIGHTS) if (folder / name).exists()]:
            raise ConfigError(f"{folder / there[0]} exists", fix="name another folder: nothing is written over")
        content = {f"{_PREFIX}{weight.theirs}": _turned(tensors[weight.ours], weight) for weight in weights}
        write_whole(folder / WEIGHTS, save(content, metadata={"format": "pt"}))
        write_whole(folder / CONFIG, json.dumps(_config(design), indent=2).encode())


def _weights(design: Design) -> Iterator[_Weight]:
    """Yield all tensors of a GPT-2."""
    width = design.shape.width
    yield _Weight("embedding.weight", _EMBEDDING, (design.tokens, width))
    yield _Weight("position.weight", "wpe.weight", (design.length, width))
    yield from _norm("norm", "ln_f", width)
    for layer in range(design.shape.layers):
        ours, theirs = f"blocks.{layer}.", f"h.{layer}."
        yield from _norm(f"{ours}norm1", f"{theirs}ln_1", width)
        yield from _norm(f"{ours}norm2", f"{theirs}ln_2", width)
        yield from _linear(f"{ours}qkv", f"{theirs}attn.c_attn", 3 * width, width)
        yield from _linear(f"{ours}out", f"{theirs}attn.c_proj", width, width)
        yield from _linear(f"{ours}up", f"{theirs}mlp.c_fc", 4 * width, width)
        yield from _linear(f"{ours}down", f"{theirs}mlp.c_proj", width, 4 * width)


def _norm(ours: str, theirs: str, width: int) -> list[_Weight]:
    return [_Weight(f"{ours}.{part}", f"{theirs}.{part}", (width,)) for part in ("weight", "bias")]


def _linear(ours: str, theirs: str, rows: int, columns: int) -> list[_Weight]:
    """Return the weights of a linear layer, which they keep as [in, out]."""
    weight = _Weight(f"{ours}.weight", f"{theirs}.weight", (rows, columns), turned=True)
    return [weight, _Weight(f"{ours}.bias", f"{theirs}.bias", (rows,))]


def _turned(value: Tensor, weight: _Weight) -> Tensor:
    """Return a tensor the other way round, if it must be, as fp32 in memory of its own."""
    value = value.detach().to("cpu", torch.float32, copy=True)
    return value.t().contiguous() if weight.turned else value.contiguous()


def _tensors(file: Any, path: Path, design: Design, *, tied: bool) -> dict[str, Tensor]:
    """Return the tensors of an open file under our names, if they are all there is and have the right shapes."""
    named = {name.removeprefix(_PREFIX): name for name in file.keys()}  # noqa: SIM118 - it is no mapping
    shapes = {name: tuple(file.get_slice(full).get_shape()) for name, full in named.items()}
    plain = {name: shape for name, shape in shapes.items() if not name.endswith(_BUFFERS) and name != _HEAD}
    weights = list(_weights(design))
    if problems := _differences({weight.theirs: weight.their_shape for weight in weights}, plain):
        raise DataError(f"{path} is not the GPT-2 that its {CONFIG} speaks of: {problems}", fix=_SAVE)
    _check_head(file, path, named, tied=tied)
    found = {}
    for weight in weights:
        value = file.get_tensor(named[weight.theirs])
        if value.dtype not in _FLOATS:
            raise DataError(f"{weight.theirs} of {path} is of {value.dtype}, which is no weight", fix=_SAVE)
        found[weight.ours] = _turned(value, weight)
    return found


def _check_head(file: Any, path: Path, named: Mapping[str, str], *, tied: bool) -> None:
    """Refuse a head that is not the embedding: ours always is."""
    same = _HEAD in named and torch.equal(file.get_tensor(named[_HEAD]), file.get_tensor(named[_EMBEDDING]))
    if not (same or (tied and _HEAD not in named)):
        raise DataError(f"{_HEAD} of {path} is not its embedding, as it is here", fix="give a GPT-2 with a tied head")


def _differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
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


def _design(path: Path) -> tuple[Design, bool]:
    """Return what config.json says, and whether the head is tied to the embedding."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", fix=_SAVE) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", fix=_SAVE) from error
    if not isinstance(tree, dict) or tree.get("model_type") != "gpt2":
        kind = tree.get("model_type") if isinstance(tree, dict) else None
        raise DataError(f"{path} is of a model of type {kind!r}, not of a gpt2", fix=_SAVE)
    for name, values in _ONLY.items():
        if tree.get(name, values[0]) not in values:
            raise DataError(
                f"{path} has {name}={tree[name]!r}, which this GPT has not",
                fix=f"give one with {name}={' or '.join(map(repr, values))}",
            )
    layers, heads, width, tokens, length = (
        _count(tree, path, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions")
    )
    if width % heads:
        raise DataError(f"{path} has {heads} heads that cannot share a width of {width}", fix=_SAVE)
    if tree.get("n_inner") not in (None, 4 * width):
        raise DataError(
            f"{path} has n_inner={tree['n_inner']!r}, which this GPT has not", fix=f"give one of {4 * width}"
        )
    return Design(Shape(layers, heads, width), tokens, length), tree.get("tie_word_embeddings", True) is True


def _count(tree: Mapping[str, Any], path: Path, name: str) -> int:
    value = tree.get(name)
    if type(value) is not int or value < 1:
        raise DataError(f"{path} has {name}={value!r}, which is no count", fix=_SAVE)
    return value


def _config(design: Design) -> dict[str, Any]:
    """Return what config.json is to say."""
    shape, drop = design.shape, design.dropout
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "n_positions": design.length,
        "vocab_size": design.tokens,
        **{name: values[0] for name, values in _ONLY.items()},
        "attn_pdrop": drop,
        "embd_pdrop": drop,
        "resid_pdrop": drop,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def _no_weights(path: Path) -> DataError:
    """Return the error for weights that are not there, or not in a file that is safe to read."""
    fix = _SAVE
    if path.with_name(f"{WEIGHTS}.index.json").is_file():
        fix = 'save them as one file: model.save_pretrained(FOLDER, max_shard_size="100GB")'
    elif path.is_file() or path.with_name("pytorch_model.bin").is_file():
        fix = f"a pickle is never read; {_SAVE}"
    return DataError(f"there is no {WEIGHTS} at {path}", fix=fix)
