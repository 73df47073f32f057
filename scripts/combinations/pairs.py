"""Lines in which every two choices of a training meet, if they may: backend, parallelism, precision, compression, ..."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import torch
from combinations import datasets as data
from combinations import models
from combinations.training import Combination, adamw
from torch import nn

import paceline
from paceline.config.values import with_settings
from paceline.errors import ConfigError

PREFIX = "pairs: "
Settings = dict[str, Any]
Row = tuple[str, ...]
"""One word of every kind of choice."""


def sgd(model: nn.Module, *, captured: bool = False) -> torch.optim.Optimizer:
    """Return SGD; only the fused one can be part of a CUDA graph."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=captured)


_SETTINGS: tuple[dict[str, Settings], ...] = (
    {"nccl": {"backend": "nccl"}, "gloo": {"backend": "gloo"}},
    {
        "ddp": {},
        "fsdp": {"parallel": "fsdp"},
        "local SGD": {"local_sgd.steps": 2, "local_sgd.replicas": 4},
    },
    {each: {"precision": each} for each in ("fp32", "tf32", "bf16", "bf16-master", "fp16")},
    {"eager": {}, "compiled": {"compile": True}},
    {"launched": {}, "captured": {"capture": "true"}},
    {"exact": {}, "free": {"exact": False}},
    {
        "whole": {},
        **{f"{each} wire": {"compression": each} for each in ("fp16", "bf16", "powersgd")},
    },
)
_OPTIMIZERS = ("AdamW", "SGD")
_MODELS = {
    "layers": partial(Combination, model=models.mlp, data=data.rows, loss=data.regress),
    "CNN": partial(
        Combination,
        model=partial(models.convolutions, "group"),
        data=data.images,
        loss=data.classify,
    ),
    "GPT": partial(Combination, model=models.LanguageModel, data=data.texts, loss=data.next_tokens),
}
_NEED_A_GPU = {"nccl", "captured"}


def lines(device: str) -> list[str]:
    """Return the names of lines that cover every possible pair of choices on a device."""
    rows = [row for row in itertools.product(*_words()) if is_valid(row, device)]
    covered = [(row, set(itertools.combinations(enumerate(row), 2))) for row in rows]
    left = set().union(*(pairs for _, pairs in covered))
    found = []
    while left:
        row, pairs = max(covered, key=lambda each: len(each[1] & left))
        left -= pairs
        found.append(PREFIX + ", ".join(row))
    return found


def is_valid(row: Row, device: str) -> bool:
    """Return whether a training with these choices is to work."""
    if device == "cpu" and _NEED_A_GPU & set(row):
        return False
    if {"fp16", "captured"} <= set(row):  # the host checks every step for overflow
        return False
    return _is_accepted(row[1:-2])


@cache
def _is_accepted(words: Row) -> bool:
    settings: Settings = {}
    for choices, word in zip(_SETTINGS[1:], words, strict=True):
        settings |= choices[word]
    try:
        with_settings(paceline.RunConfig(), settings)
    except ConfigError:
        return False
    return True


def _words() -> list[tuple[str, ...]]:
    return [*(tuple(choices) for choices in _SETTINGS), _OPTIMIZERS, tuple(_MODELS)]


def line(name: str) -> Combination:
    """Return the combination that a name describes."""
    row = name.removeprefix(PREFIX).split(", ")
    settings: Settings = {}
    for choices, word in zip(_SETTINGS, row, strict=False):
        settings |= choices[word]
    optimizer = partial(sgd, captured="captured" in row) if row[-2] == "SGD" else adamw
    return _MODELS[row[-1]](name, optimizer=optimizer, settings=settings)
