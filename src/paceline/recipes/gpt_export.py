"""Export the GPT of a run as a folder that Hugging Face transformers can load."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.checkpoint.catalog import Catalog
from paceline.checkpoint.export import Exported
from paceline.checkpoint.manifest import MANIFEST
from paceline.data.vocabulary import Tokens, Vocabulary
from paceline.errors import ConfigError
from paceline.recipes.gpt_config import GptConfig
from paceline.recipes.gpt_from_run import load_newest
from paceline.recipes.gpt_hf_names import (
    CONFIG,
    ONLY,
    PREFIX,
    WEIGHTS,
    converted,
    differences,
    weights_of,
)
from paceline.recipes.gpt_model import Design
from paceline.recipes.gpt_text import load_vocabulary
from paceline.rundir import RunDir, make_durable, write_whole, writing_to

_TOKENIZER_CONFIG = "tokenizer_config.json"
_LIKE_GPT2 = {"positions": "learned", "activation": "gelu", "norm": "layer", "bias": True}
_ANOTHER = "choose another folder"


def export_gpt2(catalog: Catalog, run: str, out: Path) -> Exported:
    """Write the GPT of the newest intact checkpoint.

    A checkpoint that was named is never replaced by another.
    """
    _refuse_folder(out)
    trained = load_newest(catalog, _refuse_design)
    tensors = trained.model.state_dict()
    vocabulary = _vocabulary(run, trained.config)
    size_bytes = write_gpt2(trained.model.design, tensors, out, vocabulary)
    return Exported(trained.step, trained.where, out, len(tensors), size_bytes, trained.passed_over)


def _vocabulary(run: str, config: GptConfig) -> Vocabulary | None:
    """Return the vocabulary of a run, named by its folder or by a checkpoint in it.

    None if it has none.
    """
    path = Path(run).absolute()
    for root in (path, *path.parents[:2]):
        folder = RunDir(root)
        if folder.config.is_file() and folder.vocabulary.is_file():
            return load_vocabulary(folder, config)
    return None


def write_gpt2(
    design: Design,
    tensors: Mapping[str, Tensor],
    folder: Path,
    vocabulary: Vocabulary | None = None,
) -> int:
    """Write weights for `GPT2LMHeadModel.from_pretrained(folder)`, with a tokenizer if there is one; return the bytes.

    The folder appears once all of its files are complete.
    """
    _refuse_design(design)
    _refuse_folder(folder)
    weights = list(weights_of(design))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if problems := differences({weight.name: weight.shape for weight in weights}, shapes):
        raise ConfigError(
            f"the weights do not match the design: {problems}",
            fix="pass model.design and model.state_dict()",
        )
    content = {}
    for weight in weights:
        content[f"{PREFIX}{weight.hf_name}"] = converted(tensors[weight.name], weight)
    files = {WEIGHTS: save(content, metadata={"format": "pt"})}
    if isinstance(vocabulary, Tokens):
        files |= {**vocabulary.files, _TOKENIZER_CONFIG: _json(_about_tokenizer(vocabulary))}
    files[CONFIG] = _json(_config(design, vocabulary.end if vocabulary else -1))
    _write_folder(folder, files)
    return sum(map(len, files.values()))


def _refuse_design(design: Design) -> None:
    """Raise if the design differs from GPT-2."""
    unsupported = []
    for name, required in _LIKE_GPT2.items():
        value = getattr(design, name)
        if value != required:
            unsupported.append(f"{name}={value}".lower())
    if unsupported:
        raise ConfigError(
            f"GPT-2 does not support {', '.join(unsupported)}",
            fix="train with positions=learned activation=gelu norm=layer bias=true",
        )


def _refuse_folder(folder: Path) -> None:
    """Raise if no folder can be written here, or if files would be overwritten."""
    if "://" in str(folder) or not folder.parent.is_dir():
        raise ConfigError(
            f"there is no folder {folder.parent}",
            fix="create it first, or give a path on this machine",
        )
    if any((place / MANIFEST).exists() for place in (folder, folder.parent)):
        raise ConfigError(
            f"{folder} is inside a checkpoint",
            fix="write elsewhere: checkpoints are never modified",
        )
    with writing_to(folder, elsewhere=_ANOTHER):
        free = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
        if not free or folder.name in {"", ".."}:
            raise ConfigError(f"{folder} exists", fix=f"{_ANOTHER}: nothing is overwritten")


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a temporary folder, then rename it; leave nothing behind on failure."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        with writing_to(folder, elsewhere=_ANOTHER):
            partial.mkdir(mode=0o700)
            for name, content in files.items():
                write_whole(partial / name, content)
            partial.rename(folder)
            make_durable(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _json(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, indent=2).encode()


def _about_tokenizer(vocabulary: Tokens) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, which refers to tokenizer.json."""
    end = vocabulary.decode([vocabulary.end]) if vocabulary.end >= 0 else None
    return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}


def _config(design: Design, end: int) -> dict[str, Any]:
    """Return the content of config.json."""
    shape, drop = design.shape, design.dropout
    end_of_text = end if end >= 0 else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.embedding_dim,
        "n_positions": design.context_length,
        "vocab_size": design.vocab_size,
        **{name: values[0] for name, values in ONLY.items()},
        "attn_pdrop": drop,
        "embd_pdrop": drop,
        "resid_pdrop": drop,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
