"""Which settings make steps faster on a GPU: a recipe takes them, any other script is told about them."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TypeVar

import torch

from paceline.config import RunConfig
from paceline.config.given import choose, chosen, is_given
from paceline.config.values import flatten
from paceline.errors import PacelineError
from paceline.exact.strategy import capture_obstacle
from paceline.world.detect import detect_world
from paceline.world.device import choose_device

C = TypeVar("C", bound=RunConfig)
_BF16_CAPABILITY = (8, 0)  # earlier GPUs emulate it


def with_gpu_settings(config: C, *, compiles: bool) -> C:
    """Return the settings of a recipe: on a GPU with bf16, CUDA graphs and, if it pays, compilation; unless they are given.

    On a CPU nothing changes.
    """
    with contextlib.suppress(PacelineError):  # the run raises it again, and reports it
        device = choose_device(detect_world(os.environ, os.getppid()), config)
        if device != "cpu":
            bf16 = torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
            return choose(config, faster_settings(config, bf16=bf16, compiles=compiles))
    return config


def faster_settings(
    config: RunConfig, *, bf16: bool = True, compiles: bool = True
) -> dict[str, Any]:
    """Return the settings that nobody has given, and that most models train faster with.

    >>> faster_settings(RunConfig(precision="tf32"))
    {'compile': True, 'capture': 'auto'}
    >>> faster_settings(RunConfig(parallel="fsdp", exact=False), compiles=False)
    {'precision': 'bf16'}
    """
    capturable = not capture_obstacle(config) and config.compression == "none"
    wanted = {
        "precision": "bf16" if bf16 else None,
        "compile": True if compiles else None,
        "capture": "auto" if capturable else None,
    }
    return {
        name: value
        for name, value in wanted.items()
        if value is not None and not is_given(config, name)
    }


def describe_speed(config: RunConfig, device: str) -> str:
    """Return the line about these settings for the start of a run; empty on a CPU, and if all of them are given.

    >>> describe_speed(RunConfig(), "cpu"), describe_speed(RunConfig(capture="auto", precision="bf16"), "cuda:0")
    ('', 'not set: compile=true may train faster on this GPU')
    >>> describe_speed(choose(RunConfig(), {"precision": "bf16"}), "cuda:0")
    'chosen for this GPU: precision=bf16; set them to train otherwise'
    """
    if device == "cpu":
        return ""
    values = dict(flatten(config))
    if names := chosen(config):
        return f"chosen for this GPU: {_words({name: values[name] for name in names})}; set them to train otherwise"
    found = {
        name: value for name, value in faster_settings(config).items() if values[name] != value
    }
    return f"not set: {_words(found)} may train faster on this GPU" if found else ""


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={str(value).lower()}" for name, value in values.items())
