"""On a GPU: updates with moving buffers, counts and several values are captured, with the bits of eager ones."""

import random

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.exact.state import state_digest
from support.processes import run_on_processes

pytestmark = pytest.mark.gpu


class Counts(nn.Module):
    """Buffers of three kinds: written in place, assigned, and of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("largest", torch.zeros(()), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(rows.mean(0), 0.1)
            self.largest = torch.maximum(self.largest, rows.abs().max())
            self.calls += 1
        return rows - self.mean


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Counts(), nn.Tanh(), nn.Linear(8, 3))


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def masked(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    used = batch["x"][:, 0] > 0
    return (losses * used).sum(), used.sum()


def several(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, object]:
    scores = model(batch["x"])
    right = (scores.argmax(1) == batch["y"]).sum()
    losses = nn.functional.cross_entropy(scores, batch["y"], reduction="none")
    return {
        "loss": (losses.sum(), len(losses)),
        "right": (right, len(scores)),
        "size": scores.square().mean(),
    }


MODELS = {"batch norm": batch_norm, "own buffers": counting}
LOSSES = {"mean": mean, "masked": masked, "several": several}


def trained(words: list[str], model: str, loss: str, changes: str = "") -> tuple[object, ...]:
    """Return digest, losses, buffers that are not saved, and the number of captured updates."""
    config = config_from_words(RunConfig, ["device=cuda", "steps=14", *words])
    generator = torch.Generator().manual_seed(3)
    rows = {
        "x": torch.randn(70, 6, generator=generator),
        "y": torch.randint(0, 3, (70,), generator=generator),
    }
    with paceline.Run(config) as run:
        network = run.model(MODELS[model]())
        optimizer = run.optimizer(torch.optim.AdamW(network.parameters(), lr=0.01))

        def compute(batch: dict[str, Tensor]) -> object:
            return LOSSES[loss](network, batch)

        found = []
        for step in run.steps(rows):
            if changes:
                _change(optimizer, network, changes, step.index)
            found.append(dict(run.update(optimizer, compute, step, clip=0.5)))
        captured = len(getattr(run._loop.updates, "_captured", ()))
        buffers = [value.tolist() for value in network.buffers()]
        digest = state_digest(run._parts.model, run._parts.optimizer)
        return digest, found, buffers, captured


def _change(optimizer: torch.optim.Optimizer, network: nn.Module, option: str, step: int) -> None:
    """Change an option of the optimizer, as OneCycleLR changes betas, or of a module: in every step, or in one."""
    group = optimizer.param_groups[0]
    if option == "betas":
        group["betas"] = (0.95 - 0.01 * step, 0.999)
    elif option == "rate":
        group["lr"] = 0.01 / (1 + step)
    elif step == 8 and option == "decay":
        group["weight_decay"] = 0.3
    elif step == 8 and option == "frozen":
        network[1].eval()
    elif step == 8:
        network[2].p = 0.4


@pytest.mark.parametrize("changes", ["betas", "rate", "decay", "dropout", "frozen"])
def test_an_option_that_the_script_changes_is_followed(changes, tmp_path):
    given = {"model": "batch norm", "loss": "mean", "changes": changes}
    words = ["batch.global_size=35", "batch.lanes=5", "steps=30"]
    eager, captured = (
        run_on_processes(trained, 1, tmp_path, {}, given | {"words": [*words, f"capture={how}"]})[0]
        for how in ("false", "auto")
    )
    assert eager[:3] == captured[:3]
    count = {"betas": 0, "rate": 0, "decay": 2, "dropout": 2}.get(changes, captured[3])
    assert captured[3] == count


@pytest.mark.parametrize("lanes", [1, 5])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_captured_updates_have_the_bits_of_eager_ones(model, loss, lanes, tmp_path):
    def results(size: int, *words: str) -> list[tuple[object, ...]]:
        words = ("batch.global_size=35", f"batch.lanes={lanes}", *words)
        given = {"model": model, "loss": loss, "words": words}
        return run_on_processes(trained, size, tmp_path, {}, given)

    eager = results(1, "capture=false")[0]
    worlds = [(1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"), (4, "nccl")]
    for size, backend in worlds[: None if lanes > 1 else 1]:
        for found in results(size, "capture=true", f"backend={backend}"):
            assert found[:3] == eager[:3], (size, backend)
            assert found[3] > 0


class Unfollowed(nn.Linear):
    """A forward that a CUDA graph cannot follow."""

    kind = "random"
    calls, limit = 0, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        by = random.random() if self.kind == "random" else float(self.calls > self.limit)
        return super().forward(rows) * (1.0 + by)


def unfollowed(kind: str, words: list[str]) -> int:
    fixed = ["device=cuda", "steps=40", "batch.lanes=2", "batch.global_size=4"]
    with paceline.Run(config_from_words(RunConfig, [*fixed, *words])) as run:
        model = run.model(Unfollowed(4, 1))
        model.kind, model.limit = kind, 12 // run.world.size
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters()))

        def loss(batch: Tensor) -> Tensor:
            return model(batch).square().mean()

        for step in run.steps(torch.randn(8, 4, generator=torch.Generator().manual_seed(1))):
            run.update(optimizer, loss, step)
        return len(run._loop.updates._captured)


@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "nccl")])
@pytest.mark.parametrize("kind", ["random", "counter"])
def test_a_replay_that_differs_from_an_eager_step_ends_capturing(kind, size, backend, tmp_path):
    given = {"kind": kind, "words": ["capture=auto", f"backend={backend}"]}
    if kind == "random":  # the first replay shows it
        assert run_on_processes(unfollowed, size, tmp_path, {}, given) == [0] * size
    else:
        with pytest.raises(AssertionError, match="not compared"):
            run_on_processes(unfollowed, size, tmp_path, {}, given)
    given["words"][0] = "capture=true"
    with pytest.raises(AssertionError, match="differs .* on rank 0"):
        run_on_processes(unfollowed, size, tmp_path, {}, given)


def evaluated(
    words: list[str], writes: bool = False, moves: bool = False
) -> tuple[list[object], int]:
    """Return the metrics of four evaluations between updates, and the number of captured scores."""
    fixed = ["device=cuda", "steps=8", "batch.global_size=12", "batch.lanes=4"]
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    with paceline.Run(config_from_words(RunConfig, [*fixed, *words])) as run:
        model = run.model(batch_norm())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def loss(batch: Tensor) -> Tensor:
            return model(batch).square().mean()

        def score(batch: Tensor) -> dict[str, object]:
            if writes:
                model.train()  # statistics and dropout, as in training
            found = model(batch)
            return {
                "size": found.square().sum(1) + torch.rand(len(batch), device=found.device),
                "large": ((found > threshold).sum(), found.numel()),
            }

        found, threshold = [], 0.0
        for step in run.steps(rows):
            run.update(optimizer, loss, step)
            if step.index % 2:
                threshold = 0.2 * step.index if moves else 0.0
                found.append(run.evaluate(rows, score))
        scores = run._inference._scores
        captured = [value for value in scores._captured.values() if value] if scores else []
        return found, len(captured)


@pytest.mark.parametrize("how", ["", "writes", "moves"])
def test_captured_scores_have_the_bits_of_eager_ones(how, tmp_path):
    """Also of scores that train, or that depend on a number of the script."""

    def results(size: int, *words: str) -> list[tuple[list[object], int]]:
        given = {"words": words} | ({how: True} if how else {})
        return run_on_processes(evaluated, size, tmp_path, {}, given)

    [(eager, _)] = results(1, "capture=false")
    for size, backend in [(1, "gloo"), (2, "nccl")]:
        for found, captured in results(size, "capture=true", f"backend={backend}"):
            assert found == eager
            assert how == "moves" or bool(captured) == (how != "writes")
