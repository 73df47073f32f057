"""`paceline verify` of exact=false: rounding is allowed, and a mistake is found although it hides among roundings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
from safetensors.numpy import save_file

from paceline.verify.compare_rounded import GRADIENT_TOLERANCES, TOLERANCE
from paceline.verify.tensor_diff import PARAMETERS, gradient_sizes, tensor_sizes
from support.program import around, paceline

SCRIPT = """import os
import time, torch, paceline
from torch import nn
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.last, self.small = nn.Linear(16, 3), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("far", torch.tensor([0.0, -1e30]))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    def forward(self, x):
        small = 1e-3 * self.small(x)
        {small}
        return self.last(self.norm(self.first(x)).relu()) + small
class Clock:
    now = 0.0
    def state_dict(self):
        return dict(now=self.now)
    def load_state_dict(self, state):
        self.now = state["now"]
with paceline.Run(paceline.config_from_argv()) as run:
    data = torch.randn(64, 8), torch.randint(3, (64,))
    {samples}
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.{optimizer}(model.parameters(), lr=0.01{rate}))
    clock = Clock()
    run.track(clock=clock)
    for step in run.steps(data, epochs={epochs}):
        def loss(batch):
            scores = model(batch[0])
            {scores}
            return nn.functional.cross_entropy(scores, batch[1])
        {update}
        {after}
"""
USUAL = dict.fromkeys(("small", "samples", "scores", "after"), "pass") | {
    "optimizer": "AdamW", "rate": "", "epochs": "1", "update": "run.update(optimizer, loss, step)",
}  # fmt: skip
BF16 = ("compression=bf16",)
GRADIENTS = "[p.grad.{}_(world) for p in model.parameters() if p.grad is not None]"
SCALED = f"run.backward(optimizer, loss, step); {GRADIENTS}; optimizer.step()"


def verdict_on(tmp_path: Path, *words: str, code: int, **changes: str) -> dict[str, Any]:
    """Run verify with exact=false on the script with some changes, and return its JSON."""
    (tmp_path / "script.py").write_text(SCRIPT.format(**USUAL | changes), encoding="utf-8")
    settings = ("--json", "--worlds", "1,2", "batch.global_size=16", "exact=false")
    done = paceline("verify", *around("script.py", [*settings, *words]), folder=tmp_path)
    assert (done.code, done.err) == (code, ""), done
    found: dict[str, Any] = json.loads(done.out)
    assert found["same"] is (code == 0)
    return found


def heavy_but(quick: str, cases: dict[str, Any]) -> list[Any]:
    """Return the names of cases as parameters, all but one of them for `make test-all`."""
    return [
        name if name == quick else pytest.param(name, marks=pytest.mark.heavy) for name in cases
    ]


RIGHT = {
    "no compression": ((), {}),
    "bf16 numbers": (("precision=bf16",), {}),
    "bf16 wire": (BF16, {}),
    "fp16 wire": (("compression=fp16",), {}),
    "PowerSGD wire": (("compression=powersgd",), {}),
    "cleared gradients": (BF16, {"after": "optimizer.zero_grad()", "optimizer": "SGD"}),
    "four updates in a step": (BF16, {"update": f"for _ in range(4): {USUAL['update']}"}),
    "options that follow the gradients": ((), {
        "optimizer": "SGD",
        "update": "run.backward(optimizer, loss, step); optimizer.param_groups[0]['lr'] = float(model.last.weight.grad.norm()); optimizer.step()",
    }),
    "a tracked clock": ((), {"after": "clock.now = time.time()", "optimizer": "SGD"}),
}  # fmt: skip
"""Settings and changes of scripts that round differently in another world, and are right."""


@pytest.mark.parametrize("name", heavy_but("bf16 wire", RIGHT))
def test_rounding_is_no_mistake(name: str, tmp_path: Path) -> None:
    words, changes = RIGHT[name]
    found = verdict_on(tmp_path, "--steps", "3", *words, code=0, **changes)
    compression = found["compression"]
    is_plain = compression == "none"
    assert found["tolerance"] == (TOLERANCE if is_plain else GRADIENT_TOLERANCES[compression])
    assert 0 < found["largest_relative"] <= found["tolerance"]
    assert len(set(found["digests"].values())) == 2


class Wrong(NamedTuple):
    """A change to the script, and where verify must find it."""

    changes: dict[str, str]
    step: int | None = None
    what: str = ""
    """What begins the name of the first difference."""
    relative: float | None = 0.0
    """The least relative size of the difference; None: a gradient that is missing has none."""
    words: tuple[str, ...] = ()


WRONG = {
    "the rate depends on the rank": Wrong({"rate": " * (1 + rank)"}, 0, "the state of different ranks", math.nan),
    "the rate depends on the world": Wrong({"rate": " * world"}, 0, "the options of", math.nan),
    "the world trains longer": Wrong({"epochs": "world"}, 4, "the number of steps", math.nan),
    "the samples depend on the world": Wrong({"samples": "data = data[0].roll(world, 0), data[1]"}, 1),
    "the scores depend on the world": Wrong({"scores": "scores = scores * (1 + 0.02 * world)"}, 1),
    "a rank has other scores": Wrong({"scores": "scores = scores * (1 + 0.1 * rank)"}, 1),
    "other weights": Wrong({"after": "model.last.bias.data += 0.01 * (world > 1 and step.index == 2)"}, 3, "model.last.bias", TOLERANCE, ("--steps", "3")),
    "a small gradient": Wrong({"small": "if world > 1: small = 10 * small - 9 * small.detach()"}, None, "gradient.small.", GRADIENT_TOLERANCES["bf16"], BF16),
    "gradients that the script divides": Wrong({"update": SCALED.format("div")}, None, "gradient.", 0.45, BF16),
    "a gradient that is missing": Wrong({"small": "if world > 1: small = small.detach()", "optimizer": "SGD"}, None, "gradient.small.", None, BF16),
    "gradients of sgd at a small rate": Wrong({"optimizer": "SGD", "rate": " * 0.01", "update": SCALED.format("mul")}, None, "", 1e-2),
    "a weight that gets no gradient": Wrong({"after": "model.unused.weight.data.mul_(1 + 9 * (world > 1))"}, None, "", 1e-2),
    "a buffer beside a large one": Wrong({"after": "model.norm.running_mean.mul_(1 + 0.5 * (world > 1))"}, None, "", 1e-2),
}  # fmt: skip


@pytest.mark.parametrize("name", heavy_but("other weights", WRONG))
def test_a_mistake_is_found_among_roundings(name: str, tmp_path: Path) -> None:
    changes, step, what, relative, words = WRONG[name]
    found = verdict_on(tmp_path, "--steps", "20", *words, code=1, **changes)["difference"]
    assert found["world"] == 2
    assert step in {None, found["step"]}
    assert found["tensor"].startswith(what)
    if relative is None:
        assert found["relative"] is None
    elif not math.isnan(relative):  # what is not a tensor has no size
        assert found["relative"] >= relative


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if not wrong.words][:6])
def test_a_mistake_is_found_among_the_roundings_of_compression(name: str, tmp_path: Path) -> None:
    changes, step, what, *_ = WRONG[name]
    found = verdict_on(tmp_path, "--steps", "20", *BF16, code=1, **changes)["difference"]
    assert (found["world"], found["step"]) == (2, step)
    assert found["tensor"].startswith(what)


def dump(path: Path, tensors: dict[str, Any], parameters: list[str]) -> Path:
    """Write a dump of tensors, as a rank does."""
    save_file(tensors, path, {PARAMETERS: json.dumps([f"model.{name}" for name in parameters])})
    return path


def test_tensors_are_measured_by_the_largest_of_their_kind(tmp_path: Path) -> None:
    infinite = numpy.float32([-numpy.inf, numpy.nan, 2])
    first = {
        "model.a": numpy.float32([8, 4]),
        "model.mask": infinite,
        "model.far": numpy.float32([-1e30, 0]),
        "model.phase": numpy.complex64([1 + 1j]),
        "model.gone": numpy.zeros(1),
        "model.shape": numpy.zeros(2),
        "model.noise": numpy.float32([1, 1]),
        "optimizer.exp_avg_sq.a": numpy.float32([1, 1]),
        "optimizer.exp_avg_sq.noise": numpy.float32([1e-12, 1]),
        "gradient.a": numpy.float32([1]),
    }
    second = first | {
        "model.a": numpy.float32([8, 4.4]),
        "model.phase": numpy.complex64([1 + 4j]),
        "model.shape": numpy.zeros(3),
        "model.noise": numpy.float32([2, 1]),
    }
    del second["model.gone"]
    files = [
        dump(tmp_path / name, each, ["a", "noise"]) for name, each in (("1", first), ("2", second))
    ]
    missing = (numpy.inf, numpy.inf)
    assert tensor_sizes(*files) == {
        "model.a": (pytest.approx(0.4), pytest.approx(0.05)),
        "model.mask": (0, 0),
        "model.far": (0, 0),
        "model.phase": (3, pytest.approx(3 * 2**-0.5)),
        "model.gone": missing,
        "model.shape": missing,
        "model.noise": (0, 0),
        "optimizer.exp_avg_sq.a": (0, 0),
        "optimizer.exp_avg_sq.noise": (0, 0),
    }
    for changed in ({"model.noise": numpy.float32([4, 1])}, {"model.noise": numpy.float32([1, 2])}):
        dump(files[1], second | changed, ["a", "noise"])
        assert tensor_sizes(*files)["model.noise"][0] >= 1


def test_a_gradient_that_overflows_in_both_runs_is_not_compared(tmp_path: Path) -> None:
    infinite, finite = numpy.float32([numpy.inf, 1]), numpy.float32([1, 1])
    files = [
        dump(tmp_path / name, {"gradient.a": infinite, "gradient.b": finite}, []) for name in "12"
    ]
    assert gradient_sizes(*files) == {"gradient.b": (0, 0)}
    dump(files[1], {"gradient.a": finite, "gradient.b": finite}, [])
    assert gradient_sizes(*files)["gradient.a"] == (numpy.inf, numpy.inf)
