"""A training of plain torch continues in a run: the same bits as in plain torch, on one rank and on two."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from paceline import Run
from paceline.cli.main import run_verb
from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError
from paceline.world.world import World
from support.loops import lanes_of
from support.program import Done, paceline

SETTINGS = ["lr.base=0.01", "batch.global_size=16", "batch.lanes=2", "steps=4"]
SCRIPT = """
import torch
import paceline
from torch.nn.functional import mse_loss

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Linear(6, 6, bias=False)
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        return self.head(self.embedding(inputs).tanh()).mean(1, keepdim=True)

def net():
    torch.manual_seed(5)
    tanh = torch.nn.Tanh()
    layers = torch.nn.Linear(6, 8), tanh, torch.nn.Linear(8, 8), tanh, torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers)

def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator)

def main(config, make=net, kind=torch.optim.AdamW):
    with paceline.Run(config) as run:
        model = run.model(make())
        optimizer = run.optimizer(kind(model.parameters(), lr=paceline.scaled_lr(config)))
        paceline.Trainer(run, model, optimizer, data(), mse_loss).fit()

if __name__ == "__main__":
    main(paceline.config_from_argv())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[..., Done]:
    return lambda *words: paceline(*words, folder=folder)


def plain_steps(model, optimizer, batches):
    """Train on micro-batches with gradient accumulation, as plain torch does."""
    for lanes in batches:
        optimizer.zero_grad()
        for inputs, targets in lanes:
            (mse_loss(model(inputs), targets) / len(lanes)).backward()
        optimizer.step()


def test_the_next_step_has_the_bits_of_plain_torch_on_two_ranks(folder, run):
    import script

    steps = lanes_of(World(), config_from_words(RunConfig, SETTINGS), script.data())
    batches = [
        [tuple(part.clone() for part in lane.batch) for lane in step.lanes] for step in steps
    ]
    model = script.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain_steps(model, optimizer, batches[:3])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(saved, "plain.pt")
    plain_steps(model, optimizer, batches[3:])

    assert run("ckpt", "import", "plain.pt", "runs/two").code == 0
    done = run("run", "-n", "2", "script.py", "name=two", *SETTINGS)
    assert done.code == 0, done
    assert "runs/two/checkpoints/step-000000003" in done.out
    run("ckpt", "export", "runs/two", "two.safetensors", "--step", "4")
    found = load_file("two.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(found[key], value), key


def start(*words: str, **how: object) -> None:
    """Run the script in this process."""
    import script

    script.main(config_from_words(RunConfig, [*SETTINGS, *words]), **how)


def imported(folder: Path, name: str, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / f"{name}.safetensors")
    import_to(name, f"{name}.safetensors")


def import_to(name: str, file: str = "plain.pt") -> None:
    assert run_verb(["ckpt", "import", file, f"runs/{name}"]) == 0


def test_other_names_and_wider_weights_are_refused(folder: Path) -> None:
    import script

    weights = script.net().state_dict()
    imported(folder, "named", {f"net.{name}": value for name, value in weights.items()})
    with pytest.raises(ConfigError, match=r"net\.0\.weight float32\[8, 6\]") as caught:
        start("name=named")
    assert "--strip-prefix" in caught.value.fix
    imported(folder, "wide", {name: value.double() for name, value in weights.items()})
    with pytest.raises(ConfigError, match=r"0\.weight .*float64.*float32"):
        start("name=wide")


def test_narrower_weights_are_widened_and_tied_ones_need_one_name(folder: Path) -> None:
    import script

    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
    imported(folder, "tied", {"embedding.weight": weight})
    model = script.Tied()
    start("name=tied", "lr.base=0", make=lambda: model, kind=torch.optim.SGD)
    assert torch.equal(model.embedding.weight, weight.float())
    assert model.head.weight is model.embedding.weight


def test_the_state_of_another_optimizer_is_refused(folder: Path) -> None:
    import script

    model = script.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain_steps(model, optimizer, [[script.data()]])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "plain.pt")
    import_to("sgd")
    with pytest.raises(ConfigError, match="exp_avg, exp_avg_sq, step.* SGD .*momentum_buffer"):
        start("name=sgd", kind=torch.optim.SGD)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """The two groups that the Trainer of transformers makes."""
    matrices = [value for value in model.parameters() if value.ndim > 1]
    vectors = [value for value in model.parameters() if value.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def reverse(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[::-1]


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, 0.1, total_iters=2), kinds.MultiStepLR(optimizer, [1, 1, 3])]
    return kinds.SequentialLR(optimizer, parts, [2])


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


def own_loop(
    name: str, groups: Callable[[nn.Module], object], schedule: object = None, steps: int = 8
) -> list[float]:
    """Continue an import with a loop that steps a scheduler; return its losses."""
    import script

    config = config_from_words(RunConfig, [f"name={name}", "batch.lanes=1"])
    loader = DataLoader(TensorDataset(*script.data()), batch_size=16)
    losses = []
    with Run(config) as run:
        model = run.model(script.net())
        optimizer = run.optimizer(torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.0))
        if schedule is not None:
            scheduler = schedule(optimizer)
            run.track(scheduler=scheduler)

        def loss(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            value = mse_loss(model(batch[0]), batch[1])
            losses.append(value.item())
            return value

        for step in run.steps(loader, steps=steps):
            run.update(optimizer, loss, step)
            if schedule is not None:
                scheduler.step()
    return losses


def plain_loop(groups: Callable[[nn.Module], object], schedule: Callable[..., Any]) -> list[float]:
    """Train eight steps in plain torch, saving after three; return the losses of the last five."""
    import script

    model, losses = script.net(), []
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.0)
    scheduler = schedule(optimizer)
    batches = [*DataLoader(TensorDataset(*script.data()), batch_size=16)] * 2
    for number, (inputs, targets) in enumerate(batches[:8]):
        if number == 3:
            saved = {"optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}
            torch.save(saved | {"model": model.state_dict(), "step": 3}, "plain.pt")
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
    return losses[3:]


@pytest.mark.parametrize(
    ("before", "schedule", "now"),
    [
        (nn.Module.parameters, one_cycle, nn.Module.parameters),
        (reverse, warm_up, reverse),
        (decay_groups, warm_up, nn.Module.parameters),
    ],
)
def test_five_more_steps_with_a_scheduler_have_the_losses_of_plain_torch(
    folder: Path,
    before: Callable[[nn.Module], object],
    schedule: Callable[..., Any],
    now: Callable[[nn.Module], object],
) -> None:
    expected = plain_loop(before, schedule)
    import_to("net")
    assert own_loop("net", now, schedule) == expected


def test_what_an_import_does_not_restore_is_named(folder, capsys):
    plain_loop(nn.Module.parameters, one_cycle)
    import_to("none")
    for name in ("other", "groups"):
        shutil.copytree("runs/none", f"runs/{name}")
    own_loop("none", nn.Module.parameters)
    assert "tracks none" in capsys.readouterr().out
    own_loop("other", nn.Module.parameters, warm_up)
    assert "another class of scheduler" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"\[6\] parameters"):
        own_loop("groups", lambda model: list(model.parameters())[:4])


def test_an_import_that_counts_epochs_resumes_at_their_end(folder: Path) -> None:
    import script

    torch.save({"MODEL_STATE": script.net().state_dict(), "EPOCHS_RUN": 1}, "plain.pt")
    import_to("net")
    assert len(own_loop("net", nn.Module.parameters, steps=6)) == 2  # 64 samples are four steps
