"""The first mistakes of a person who comes from another library: the message says what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.data.reading.source import as_source
from paceline.errors import ConfigError
from paceline.exact.loss import named_values
from paceline.exact.row import Layout


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("lr=0.1", "lr.base"), ("learning_rate=0.1", "lr.base"), ("batch=32", "batch.global_size"), ("num_workers=2", "read.workers"),
        ("gpus=4", "paceline run -n 4"), ("device=gpu", "cuda"), ("precision=float16", "fp16"), ("seed", "seed="),
        ("--batch-size=32", "--batch.global-size"), ("--lr", "--lr.base"),
    ],
)  # fmt: skip
def test_the_setting_of_another_program_leads_to_ours(word: str, typed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_words(RunConfig, [word])
    assert typed in refused.value.fix


@dataclass(frozen=True)
class OtherType(RunConfig):
    precision: str = "bf16"  # type: ignore[assignment]


@dataclass(frozen=True)
class NoAnnotation(RunConfig):
    precision = "bf16"


class NoDataclass(RunConfig):
    mine: int = 3


@dataclass(frozen=True, slots=True)
class Slots(RunConfig):
    mine: int = 3


@pytest.mark.parametrize(
    ("kind", "typed"),
    [(OtherType, "precision: Literal['fp32', "), (NoAnnotation, "= 'bf16'"), (NoDataclass, "@dataclass(frozen=True)")],
)  # fmt: skip
def test_a_class_of_settings_that_would_have_no_effect_is_refused(kind, typed):
    with pytest.raises(ConfigError) as refused:
        config_from_words(kind, [])
    assert typed in refused.value.fix
    assert config_from_words(Slots, ["mine=4"]).mine == 4


def config_in(folder: Path) -> RunConfig:
    return config_from_words(RunConfig, [f"runs={folder}", "batch.global_size=8"])


def test_a_run_without_with_or_with_other_arguments_says_how_it_is_used(tmp_path: Path) -> None:
    for made in (lambda: RunConfig(lr=0.1), lambda: paceline.Run({"epochs": 3})):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"lr.base|RunConfig\(epochs"):
            made()
    run = paceline.Run(config_in(tmp_path))
    for use in (lambda: run.model(nn.Linear(2, 2)), lambda: run.device):
        with pytest.raises(ConfigError) as refused:
            use()
        assert "with paceline.Run(config) as run:" in refused.value.fix
    assert not hasattr(run, "rank")


def test_calls_of_other_libraries_lead_to_ours(tmp_path: Path) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model = run.model(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def says(typed: str, use: Callable[[], object]) -> None:
            with pytest.raises(ConfigError) as refused:
                use()
            assert typed in refused.value.fix

        def loss(batch: Any) -> Tensor:
            found: Tensor = model(batch[0]).square().mean()
            return found

        own: Any = run
        says("run.world.rank", lambda: own.rank)
        says("run.is_main", lambda: own.is_main_process)
        says("run.model(model)", lambda: own.model([model]))
        says("run.optimizer(torch.optim", lambda: own.optimizer(model))
        says("run.track(scheduler=", lambda: own.track(optimizer))
        for step in run.steps((torch.randn(8, 4),), epochs=1):
            which: Any = step
            says("run.update(optimizer, loss, step)", lambda: own.update(optimizer, loss))
            enumerated = (0, step)
            says("step.index", lambda: own.update(optimizer, loss, enumerated))  # noqa: B023
            says("loss(batch)", lambda: which.batch)  # noqa: B023
            says("loss(batch)", lambda: list(which))  # noqa: B023
            run.update(optimizer, loss, step)


class Output(dict[str, Any]):
    """As the ModelOutput of transformers: a mapping whose keys are attributes, too."""

    __getattr__ = dict.get


class Pair(NamedTuple):
    loss: Tensor
    tokens: int


def test_what_a_model_returns_is_no_loss() -> None:
    loss, logits = torch.ones((), requires_grad=True), torch.ones(3, 2)
    for result, typed in [
        (Output(loss=loss, logits=logits), ".loss"),
        (Output(logits=logits), ".logits"),
        ((loss, logits), "return the loss alone"),
        (None, "return"),
        (1.0, ".item()"),
    ]:
        with pytest.raises(ConfigError) as refused:
            named_values(result)
        assert typed in refused.value.fix
    assert Layout.of(named_values(Pair(loss, 2))[1], 0).by_count
    assert list(named_values(Output(loss=loss, kl=2.0))[1]) == ["loss", "kl"]


class Iterated(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_data_that_cannot_be_read_lead_to_what_can() -> None:
    numbers: Any = [1, 2]
    batches = BatchSampler(SequentialSampler(numbers), 2, drop_last=False)
    array = numpy.zeros(3)
    for data, typed in [
        (DataLoader(numbers, batch_sampler=batches), "by_length"),
        (DataLoader(numbers, batch_sampler=[[0, 1]]), "by_length"),
        (Iterated(), "paceline.Stream"),
        ((array, array), "torch.from_numpy"),
    ]:
        with pytest.raises(ConfigError) as refused:
            as_source(data)
        assert typed in refused.value.fix
