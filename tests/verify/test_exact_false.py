"""`paceline verify` of exact=false: rounding is allowed, and a mistake is found although it hides among roundings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
from safetensors.numpy import save_file

from paceline.verify.compare_rounded import GRADIENT_TOLERANCES, TOLERANCE
from paceline.verify.tensor_diff import tensor_sizes
from support.program import around, paceline

SCRIPT = """import os
import torch, paceline
from torch import nn
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.last, self.small = nn.Linear(16, 3), nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    def forward(self, x):
        small = 1e-3 * self.small(x)
        {small}
        return self.last(self.norm(self.first(x)).relu()) + small
with paceline.Run(paceline.config_from_argv()) as run:
    data = torch.randn(64, 8), torch.randint(3, (64,))
    {samples}
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.{optimizer}(model.parameters(), lr=0.01{rate}))
    for step in run.steps(data, epochs={epochs}):
        def loss(batch):
            scores = model(batch[0])
            {scores}
            return nn.functional.cross_entropy(scores, batch[1])
        {update}
        {after}
"""
USUAL = {
    "small": "pass",
    "samples": "pass",
    "optimizer": "AdamW",
    "rate": "",
    "epochs": "1",
    "scores": "pass",
    "update": "run.update(optimizer, loss, step)",
    "after": "pass",
}
SETTINGS = ("--worlds", "1,2", "--steps", "3", "batch.global_size=16", "exact=false")


def verdict_on(tmp_path: Path, *words: str, code: int, **changes: str) -> dict[str, Any]:
    """Run verify with exact=false on the script with some changes, and return its JSON."""
    (tmp_path / "script.py").write_text(SCRIPT.format(**USUAL | changes), encoding="utf-8")
    given = around("script.py", ["--json", *SETTINGS, *words])
    done = paceline("verify", *given, folder=tmp_path)
    assert (done.code, done.err) == (code, ""), done
    found: dict[str, Any] = json.loads(done.out)
    assert found["same"] is (code == 0)
    return found


@pytest.mark.parametrize(
    "words",
    [(), ("precision=bf16",), ("compression=bf16",), ("compression=fp16",), ("compression=powersgd",)],
    ids=lambda words: words[0] if words else "no compression",
)  # fmt: skip
def test_rounding_is_no_mistake(words: tuple[str, ...], tmp_path: Path) -> None:
    found = verdict_on(tmp_path, *words, code=0)
    compression = found["compression"]
    assert found["tolerance"] == GRADIENT_TOLERANCES.get(compression, TOLERANCE)
    assert 0 < found["largest_relative"] <= found["tolerance"]
    assert len(set(found["digests"].values())) == 2


class Mistake(NamedTuple):
    """A change to the script, and where verify must find it."""

    changes: dict[str, str]
    step: int
    what: str
    """What begins the name of the first difference."""


MISTAKES = {
    "the rate depends on the rank": Mistake({"rate": " * (1 + rank)"}, 0, "the state of different ranks"),
    "the rate depends on the world": Mistake({"rate": " * world"}, 0, "the options of"),
    "the world trains longer": Mistake({"epochs": "world"}, 4, "the number of steps"),
    "the samples depend on the world": Mistake({"samples": "data = data[0].roll(world, 0), data[1]"}, 1, ""),
    "the scores depend on the world": Mistake({"scores": "scores = scores * (1 + 0.02 * world)"}, 1, ""),
    "a rank has other scores": Mistake({"scores": "scores = scores * (1 + 0.1 * rank)"}, 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_among_roundings(name: str, compression: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    words = ["--steps", "20", f"compression={compression}"]
    found = verdict_on(tmp_path, *words, code=1, **mistake.changes)
    difference = found["difference"]
    assert (difference["world"], difference["step"]) == (2, mistake.step)
    assert difference["tensor"].startswith(mistake.what)


def test_weights_that_differ_by_more_than_rounding_are_found(tmp_path: Path) -> None:
    after = "model.last.bias.data += 0.01 * (world > 1 and step.index == 2)"
    found = verdict_on(tmp_path, code=1, after=after)
    difference = found["difference"]
    assert (difference["step"], difference["tensor"]) == (3, "model.last.bias")
    assert difference["relative"] > TOLERANCE


def test_a_small_gradient_is_compared_by_its_own_size(tmp_path: Path) -> None:
    small = "if world > 1: small = 10 * small - 9 * small.detach()"
    found = verdict_on(tmp_path, "compression=bf16", code=1, small=small)
    assert found["difference"]["tensor"].startswith("gradient.1.small.")
    assert found["difference"]["relative"] > found["tolerance"]


def test_gradients_that_the_script_divides_are_compared_as_the_optimizer_gets_them(
    tmp_path: Path,
) -> None:
    divided = "run.backward(optimizer, loss, step); [p.grad.div_(world) for p in model.parameters()]; optimizer.step()"
    found = verdict_on(tmp_path, "compression=bf16", code=1, update=divided)
    assert found["difference"]["tensor"].startswith("gradient.1.")
    assert found["difference"]["relative"] == pytest.approx(0.5, rel=0.1)


def test_a_gradient_that_is_missing_in_one_world_is_found(tmp_path: Path) -> None:
    changes = {"small": "if world > 1: small = small.detach()", "optimizer": "SGD"}
    found = verdict_on(tmp_path, "compression=bf16", code=1, **changes)
    assert found["difference"]["tensor"].startswith("gradient.1.small.")
    assert found["difference"]["relative"] is None


def test_gradients_are_compared_that_the_script_clears(tmp_path: Path) -> None:
    cleared = {"after": "optimizer.zero_grad()", "optimizer": "SGD"}
    found = verdict_on(tmp_path, "compression=bf16", code=0, **cleared)
    assert found["largest_relative"] > 0


def test_tensors_of_two_files_are_compared_by_the_largest_of_their_kind(tmp_path: Path) -> None:
    infinite = numpy.float32([-numpy.inf, numpy.nan, 2])
    first = {
        "model.a": numpy.float32([8, 4]),
        "model.mask": infinite,
        "model.gone": numpy.zeros(1),
        "model.shape": numpy.zeros(2),
        "model.noise": numpy.float32([1]),
        "optimizer.exp_avg.a": numpy.float32([1, 1]),
        "optimizer.exp_avg.noise": numpy.float32([1e-9]),
        "gradient.1.a": numpy.float32([1]),
    }
    second = first | {
        "model.a": numpy.float32([8, 4.4]),
        "model.shape": numpy.zeros(3),
        "model.noise": numpy.float32([2]),
    }
    del second["model.gone"]
    save_file(first, tmp_path / "first")
    save_file(second, tmp_path / "second")
    missing = (numpy.inf, numpy.inf)
    assert tensor_sizes(tmp_path / "first", tmp_path / "second") == {
        "model.a": (pytest.approx(0.4), pytest.approx(0.05)),
        "model.mask": (0, 0),
        "model.gone": missing,
        "model.shape": missing,
        "optimizer.exp_avg.a": (0, 0),
    }
    second["optimizer.exp_avg.noise"] = numpy.float32([1])
    save_file(second, tmp_path / "second")
    assert tensor_sizes(tmp_path / "first", tmp_path / "second")["model.noise"] == (1, 0.125)
