"""What a recipe chooses for a GPU is never what was given, always valid, and refused by name on another device."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.config.given import choose, chosen, with_values
from paceline.errors import ConfigError
from paceline.recipes.gpt import for_device
from paceline.recipes.gpt_config import GptConfig, with_vocabulary
from paceline.train.gpu_settings import describe_speed, faster_settings

CHOICES = {
    "parallel": ["ddp", "fsdp"],
    "local_sgd": ["", "4"],
    "exact": ["true", "false"],
    "compression": ["none", "bf16", "powersgd"],
}


def test_every_valid_combination_stays_valid() -> None:
    valid = 0
    for values in itertools.product(*CHOICES.values()):
        given = dict(zip(CHOICES, values, strict=True))
        local = ["local_sgd.steps=4", "local_sgd.replicas=2"] if given.pop("local_sgd") else []
        words = [*local, *(f"{name}={value}" for name, value in given.items())]
        try:
            config = config_from_words(RunConfig, words)
        except ConfigError:
            continue
        valid += 1
        assert chosen(choose(config, faster_settings(config)))[:2] == ("precision", "compile")
    assert valid > 5


@pytest.mark.parametrize("word", ["precision=fp32", "compile=false", "capture=false"])
def test_what_is_given_is_not_chosen_though_it_is_the_default(word: str) -> None:
    config = config_from_words(RunConfig, [word])
    found = faster_settings(config)
    assert word.partition("=")[0] not in found
    assert len(found) == 2


def test_nothing_is_chosen_on_a_cpu_and_nothing_suggested() -> None:
    config = config_from_words(GptConfig, ["size=124M", "device=cpu"])
    assert for_device(config) is config
    assert describe_speed(config, "cpu") == ""


def test_a_recipe_that_completes_its_settings_still_knows_what_was_chosen() -> None:
    config = choose(config_from_words(GptConfig, ["vocab_size=300"]), {"precision": "bf16"})
    completed = with_values(with_vocabulary(config, None), steps=9)
    assert "precision=bf16" in describe_speed(completed, "cuda:0")


def train(config: RunConfig) -> None:
    with paceline.Run(config) as run:
        model = run.model(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps((torch.ones(8, 4),), steps=1):
            run.update(optimizer, lambda batch: model(batch[0]).mean(), step)


def test_a_run_with_chosen_settings_is_refused_by_name_where_they_are_not_chosen(tmp_path):
    config = RunConfig(runs=str(tmp_path), device="cpu")
    train(choose(config, {"precision": "bf16"}))
    with pytest.raises(ConfigError, match="precision bf16 -> fp32") as error:
        train(config)
    assert "precision=bf16" in error.value.fix
    with pytest.raises(ConfigError) as error:
        train(with_values(config, seed=3))
    assert "as it began" not in error.value.fix


@pytest.mark.gpu
def test_a_recipe_chooses_for_a_gpu_shows_it_and_saves_it(tmp_path: Path) -> None:
    words = ["train", "mnist", "steps=2", f"runs={tmp_path}", "compile=false"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=True
    )
    assert "chosen for this GPU: precision=bf16, capture=auto" in done.stdout
    saved = tomllib.loads((tmp_path / "mnist" / "config.toml").read_text())
    assert (saved["precision"], saved["capture"]) == ("bf16", "auto")
