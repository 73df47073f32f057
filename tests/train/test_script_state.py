"""Is what a script keeps beside the run tracked, restored, or named?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import paceline
from paceline.config.values import with_settings
from paceline.errors import ConfigError

DATA = (torch.arange(32.0).view(32, 1) / 32,)
SETTINGS = {"batch.global_size": 8, "batch.lanes": 4, "epochs": 1, "checkpoint.every": "end"}


def config_in(folder: Path, **settings: object) -> paceline.RunConfig:
    return with_settings(paceline.RunConfig(), SETTINGS | {"runs": str(folder)} | settings)


def parts(run: paceline.Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = run.model(nn.Linear(1, 1))
    return model, run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def train(run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)


class OwnScheduler:
    """Like those of timm: not torch's class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


UNTRACKED = {
    "step": lambda model, optimizer: StepLR(optimizer, 1),
    "plateau": lambda model, optimizer: ReduceLROnPlateau(optimizer),
    "own": lambda model, optimizer: OwnScheduler(optimizer),
    "averaged": lambda model, optimizer: AveragedModel(model),
    "scaler": lambda model, optimizer: torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("kind", UNTRACKED)
def test_what_the_run_does_not_track_is_refused_by_the_name_of_its_variable(
    kind: str, tmp_path: Path
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        mine = UNTRACKED[kind](model, optimizer)
        with pytest.raises(ConfigError, match=r"mine .* not tracked") as found:
            train(run, model, optimizer)
        assert "run.track(mine=mine)" in found.value.fix
        run.untracked(mine)
        train(run, model, optimizer)


class Experiment:
    """A script whose loop is a method."""

    def __init__(self, run: paceline.Run) -> None:
        self.run, (self.model, self.optimizer) = run, parts(run)
        self.scheduler = StepLR(self.optimizer, 1)

    def fit(self) -> None:
        for step in self.run.steps(DATA):
            self.run.update(self.optimizer, lambda batch: self.model(batch[0]).mean(), step)


def test_an_attribute_of_self_is_found(tmp_path: Path) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        experiment = [Experiment(run)]  # the method's own frame has it as self
        with pytest.raises(ConfigError, match="self.scheduler") as found:
            experiment[0].fit()
        assert "run.track(scheduler=self.scheduler)" in found.value.fix


def test_the_script_of_a_trainer_is_searched(tmp_path: Path) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        things = {"scheduler": StepLR(optimizer, 1)}
        trainer = paceline.Trainer(run, model, optimizer, DATA * 2, nn.functional.mse_loss)
        with pytest.raises(ConfigError, match="things") as found:
            trainer.fit()
        assert "=things['scheduler'])" in found.value.fix
        assert things


class Inner:
    """Tracked as a whole: what it holds is its own state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.schedulers = [LambdaLR(optimizer, lambda n: 0.9**n)]

    def state_dict(self) -> Any:
        return self.schedulers[0].state_dict()["last_epoch"]

    def load_state_dict(self, state: Any) -> None: ...


def test_schedulers_inside_of_tracked_ones_and_those_of_other_optimizers_are_not_refused(
    tmp_path: Path,
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        foreign = StepLR(other, 1)
        first, second = ConstantLR(optimizer, 0.5), StepLR(optimizer, 2)
        both = SequentialLR(optimizer, [first, second], [2])
        inner = Inner(optimizer)
        scheduler = inner.schedulers[0]
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        run.track(both=both, inner=inner)
        train(run, model, optimizer)
        assert foreign and scheduler and disabled


def test_a_scheduler_that_is_not_found_is_refused_by_its_mark_on_the_optimizer(
    tmp_path: Path,
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = parts(run)
        hidden = SimpleNamespace(deep=SimpleNamespace(er=[StepLR(optimizer, 1)]))
        with pytest.raises(ConfigError, match="run tracks none"):
            train(run, model, optimizer)
        run.untracked(optimizer)
        train(run, model, optimizer)
        assert hidden


def late(run: paceline.Run, taken: list[int]) -> None:
    model, optimizer = parts(run)
    for step in run.steps(DATA):
        scheduler = StepLR(optimizer, 1)
        run.update(optimizer, lambda batch: model(batch[0]).mean(), step)
        taken.append(scheduler.last_epoch)


def test_a_scheduler_made_after_run_steps_is_refused_after_the_first_step(tmp_path: Path) -> None:
    taken: list[int] = []
    with (
        pytest.raises(ConfigError, match="scheduler .* not tracked"),
        paceline.Run(config_in(tmp_path)) as run,
    ):
        late(run, taken)
    assert len(taken) == 1
