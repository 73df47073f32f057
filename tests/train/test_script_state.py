"""Is what a script keeps beside the run tracked, restored, or named?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import paceline
from paceline.errors import ConfigError, TrainingError
from paceline.train import run as run_module
from paceline.world.world import World
from support.loops import SHORT, Patience, RunIn, config_in, events_in, line, squares
from support.processes import on_processes

DATA = (torch.arange(32.0).view(32, 1) / 32,)


def ended(folder: Path, name: str) -> str:
    """Return the digest at the end of a run."""
    return str([event for event in events_in(folder, name=name) if "digest" in event][-1]["digest"])


def train(run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in run.steps(DATA):
        run.update(optimizer, squares(model), step)


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
def test_what_the_run_does_not_track_is_refused_by_the_name_of_its_variable(kind, tmp_path):
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = line(run)
        mine = UNTRACKED[kind](model, optimizer)
        with pytest.raises(ConfigError, match="mine ") as found:
            train(run, model, optimizer)
        assert "run.track(mine=mine)" in found.value.fix
        run.untracked(mine)
        train(run, model, optimizer)


class Experiment:
    """A script whose loop is a method."""

    def __init__(self, run: paceline.Run) -> None:
        self.run, (self.model, self.optimizer) = run, line(run)
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
        model, optimizer = line(run)
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


def test_schedulers_inside_of_tracked_ones_and_those_of_other_optimizers_are_not_refused(tmp_path):
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = line(run)
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


def test_a_scheduler_that_is_not_found_is_refused_by_its_mark_on_the_optimizer(tmp_path):
    with paceline.Run(config_in(tmp_path)) as run:
        model, optimizer = line(run)
        hidden = SimpleNamespace(deep=SimpleNamespace(er=[StepLR(optimizer, 1)]))
        with pytest.raises(ConfigError, match="run tracks none"):
            train(run, model, optimizer)
        run.untracked(optimizer)
        train(run, model, optimizer)
        assert hidden


def test_a_scheduler_made_after_run_steps_is_refused_after_the_first_step(tmp_path: Path) -> None:
    taken: list[int] = []

    def late(run: paceline.Run) -> None:
        model, optimizer = line(run)
        for step in run.steps(DATA):
            scheduler = StepLR(optimizer, 1)
            run.update(optimizer, squares(model), step)
            taken.append(scheduler.last_epoch)

    with pytest.raises(ConfigError, match="scheduler "), paceline.Run(config_in(tmp_path)) as run:
        late(run)
    assert len(taken) == 1


CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "backward": lambda model, _: model(torch.ones(1, 1)).mean().backward(),
}
LEAVES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "read": lambda model, _: nn.utils.get_total_norm([each.grad for each in model.parameters()]),
    "none": lambda _, optimizer: optimizer.zero_grad(),
    "zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("after", [*CHANGES, *LEAVES])
def test_gradients_may_be_read_and_freed_after_the_update_but_not_changed(after, tmp_path):
    def train() -> None:
        with paceline.Run(config_in(tmp_path)) as run:
            model, optimizer = line(run)
            for step in run.steps(DATA):
                run.update(optimizer, squares(model), step)
                (CHANGES | LEAVES)[after](model, optimizer)

    if after in LEAVES:
        train()
        return
    with pytest.raises(ConfigError, match=r"after run\.update") as found:
        train()
    assert "clip=" in found.value.fix


class Words(torch.optim.SGD):
    """An optimizer that counts in its state under words, as some of those from papers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1
        self.state["all"]["sum"] = self.state["all"].get("sum", torch.zeros(2)) + 1.5
        self.state["all"]["mode"] = "late" if self.state["count"] > 1 else "early"
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["count"]
        super().step()


def several_models(run: paceline.Run, several: int, rule: Any) -> list[torch.optim.Optimizer]:
    models = [run.model(nn.Linear(1, 1), name=f"m{at}") for at in range(several)]
    optimizers = [run.optimizer(rule(each.parameters())) for each in models]
    for step in run.steps(DATA):
        for model, optimizer in zip(models, optimizers, strict=True):
            run.update(optimizer, squares(model), step)
    return optimizers


class Sharp(torch.optim.Optimizer):
    """An optimizer around another one, which its `state_dict` leaves out, like SAM and Lookahead."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value]["old"] = value.detach().clone()


@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("rule", [Words, Sharp])
def test_words_in_the_state_of_an_optimizer_and_an_optimizer_inside_of_it_are_restored(
    rule: Any, several: int, tmp_path: Path
) -> None:
    for name, steps in (("whole", 4), ("part", 2), ("part", 4)):
        torch.manual_seed(0)
        with paceline.Run(config_in(tmp_path, name=name, steps=steps, seed=1)) as run:
            found = several_models(run, several, rule)
    if rule is Words:
        states = [(each.state["count"], each.state["all"]) for each in found]
        assert [(count, words["sum"].tolist(), words["mode"]) for count, words in states] == [
            (4, [6.0, 6.0], "late")
        ] * several
    assert ended(tmp_path, "whole") == ended(tmp_path, "part")


def test_a_copy_that_the_loop_moves_has_the_names_of_the_model_and_is_not_refused(tmp_path):
    with paceline.Run(config_in(tmp_path, steps=3)) as run:
        model, optimizer = line(run)
        teacher = run.model(copy.deepcopy(model).requires_grad_(False), name="teacher")
        for step in run.steps(DATA):
            run.update(
                optimizer,
                lambda batch: (model(batch[0]) - teacher(batch[0]) + 1).square().mean(),
                step,
            )
            for mean, value in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(value.data, 0.1)


class Net(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(1, 8), nn.Dropout(p), nn.Linear(8, 1)
        self.calls, self.counts = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += int(self.counts)
        return self.last(self.drop(self.first(x)))


def unfreezing(run: paceline.Run, p: float = 0.1) -> None:
    """Everything changes at step 1, before the checkpoint of the shorter training."""
    model = Net(p)
    model.first.requires_grad_(False)
    run.model(model)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in run.steps(DATA):
        if step.index == 1:
            model.first.requires_grad_(True)
            model.drop.p = 0.5
        run.update(optimizer, lambda batch: model(batch[0]).square().mean(), step)


def test_what_the_loop_changes_in_modules_is_restored_and_another_script_is_named(tmp_path, capsys):
    for name, steps in (("whole", 4), ("part", 2), ("part", 3)):
        with paceline.Run(config_in(tmp_path, name=name, steps=steps)) as run:
            torch.manual_seed(0)
            unfreezing(run)
    capsys.readouterr()
    with paceline.Run(config_in(tmp_path, name="part", steps=4)) as run:
        torch.manual_seed(0)
        unfreezing(run, p=0.2)
    assert "drop.p 0.2 (was 0.1, which is not used" in capsys.readouterr().out
    assert ended(tmp_path, "whole") == ended(tmp_path, "part")


def test_a_number_that_forward_changes_is_named_once(tmp_path, capsys):
    with paceline.Run(config_in(tmp_path)) as run:
        model = run.model(Net())
        model.counts = True
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(run, model, optimizer)
    assert capsys.readouterr().err.count("forward changes calls") == 1


def dropping(world: World, config: paceline.RunConfig) -> None:
    with RunIn(world, config) as run:
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.drop.p += 0.1 * world.rank
        train(run, model, optimizer)


@on_processes(2, **SHORT)
def test_dropout_that_differs_between_ranks_is_named(
    world: World, config: paceline.RunConfig
) -> None:
    with pytest.raises(TrainingError, match="p of Dropout"):
        dropping(world, config)


def test_the_rate_of_the_checkpoint_is_used_and_another_one_is_named(tmp_path, capsys):
    def options_of(lr: float, weight_decay: float = 0.0, **settings: Any) -> list[float]:
        with paceline.Run(config_in(tmp_path, epochs=1, **settings)) as run:
            model, optimizer = line(run, lr, weight_decay=weight_decay)
            train(run, model, optimizer)
            return [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")]

    options_of(0.001, 0.1, steps=1)
    capsys.readouterr()
    assert options_of(0.5, 0.1, steps=2) == [0.001, 0.1]
    out = capsys.readouterr().out
    assert "lr 0.0010" in out
    assert "lr 0.5" not in out
    assert "is 0.5; it was 0.001" in out
    assert options_of(0.5, 0.2, steps=3, resume="changed") == [0.5, 0.2]


def keeping(run: paceline.Run, kind: str) -> None:
    model, optimizer = line(run)
    ema = copy.deepcopy(model)
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    patience = Patience()
    teacher, images = copy.deepcopy(model), [torch.ones(3)]
    again = nn.Sequential(model)  # the same weights under another name
    if kind == "untracked":
        run.untracked(ema, shadow, patience)
    if kind == "tracked":
        run.track(ema=ema, patience=patience)
    for step in run.steps(DATA):
        run.update(optimizer, lambda batch: again(batch[0]).square().mean(), step)
        for name, value in model.named_parameters():
            ema.get_parameter(name).data.mul_(0.9).add_(value.data, alpha=0.1)
            shadow[name] = 0.9 * shadow[name] + 0.1 * value.detach()
        patience.bad += 1
    assert teacher and images


@pytest.mark.parametrize(
    ("kind", "named"),
    [("kept", {"ema", "shadow", "patience"}), ("tracked", {"shadow"}), ("untracked", set())],
)
def test_copies_and_counters_that_change_in_the_loop_are_named_once(kind, named, tmp_path, capsys):
    with paceline.Run(config_in(tmp_path)) as run:
        keeping(run, kind)
    lines = capsys.readouterr().err.splitlines()
    found = [line.split()[1] for line in lines if "changes in the loop" in line]
    assert sorted(found) == sorted(named)


def carrying(run: paceline.Run) -> None:
    """Carries a rate, a hidden state and a best value; the rest is only reported, or set before it is read."""
    model, optimizer = line(run)
    rate, hidden, best, total, seen, x, noise = 0.1, torch.zeros(1), 9.0, 0.0, 0, 1.0, 1.0
    rng, split = np.random.default_rng(0), np.random.default_rng(1)
    split.permutation(4)

    def loss(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        nonlocal hidden
        hidden = hidden.detach() + batch[0].mean()
        return (model(batch[0]) + 0 * hidden + 0 * noise).square().mean()

    for step in run.steps(DATA):
        noise = float(rng.normal())
        value = float(run.update(optimizer, loss, step)["loss"])
        total += value
        seen = seen + 1
        x = value + 1
        if x > best + 99:
            run.finish("diverged")
        if step.ends_epoch:
            rate /= 3
            optimizer.param_groups[0]["lr"] = rate
            best = min(best, value)
        if seen % 2 == 0:
            run.print(total / seen)


def test_variables_that_the_loop_carries_and_generators_that_it_draws_from_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with paceline.Run(config_in(tmp_path)) as run:
        carrying(run)
    err = capsys.readouterr().err
    assert "carries best, hidden, rate from step" in err
    found = [line.split()[1] for line in err.splitlines() if "changes in the loop" in line]
    assert found == ["rng"]


@on_processes(1, **{"batch.global_size": 8, "batch.lanes": 2, "steps": 4})
def test_a_running_average_that_the_loss_keeps_is_named_once(config, world) -> None:
    average, factor = {"loss": 1.0}, 0.5

    said: list[str] = []
    rows = torch.ones(16, 3)
    with pytest.MonkeyPatch.context() as patch, RunIn(world, config) as run:
        patch.setattr(run_module.terminal, "error", said.append)
        model = run.model(nn.Linear(3, 3))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def lane(batch: Tensor) -> Tensor:
            found = mse_loss(model(batch), batch) * factor
            average["loss"] = 0.9 * average["loss"] + 0.1 * float(found)
            return found / average["loss"]

        for step in run.steps(rows):
            run.update(optimizer, lane, step)
    assert [text for text in said if "the loss changes average" in text] == said[:1]
