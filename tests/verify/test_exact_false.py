"""`paceline verify` of exact=false: rounding is allowed, and a mistake is found although it hides among roundings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
from safetensors.numpy import save_file

from paceline.rundir import PARAMETERS
from paceline.verify.compare_rounded import GRADIENT_TOLERANCES, TOLERANCE
from paceline.verify.tensor_diff import gradient_sizes, tensor_sizes
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
    is_plain = compression == "none"
    assert found["tolerance"] == (TOLERANCE if is_plain else GRADIENT_TOLERANCES[compression])
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
    assert found["difference"]["tensor"].startswith("gradient.small.")
    assert found["difference"]["relative"] > found["tolerance"]


def test_gradients_that_the_script_divides_are_compared_as_the_optimizer_gets_them(
    tmp_path: Path,
) -> None:
    divided = "run.backward(optimizer, loss, step); [p.grad.div_(world) for p in model.parameters() if p.grad is not None]; optimizer.step()"
    found = verdict_on(tmp_path, "compression=bf16", code=1, update=divided)
    assert found["difference"]["tensor"].startswith("gradient.")
    assert found["difference"]["relative"] == pytest.approx(0.5, rel=0.1)


def test_a_gradient_that_is_missing_in_one_world_is_found(tmp_path: Path) -> None:
    changes = {"small": "if world > 1: small = small.detach()", "optimizer": "SGD"}
    found = verdict_on(tmp_path, "compression=bf16", code=1, **changes)
    assert found["difference"]["tensor"].startswith("gradient.small.")
    assert found["difference"]["relative"] is None


def test_gradients_are_compared_that_the_script_clears(tmp_path: Path) -> None:
    cleared = {"after": "optimizer.zero_grad()", "optimizer": "SGD"}
    found = verdict_on(tmp_path, "compression=bf16", code=0, **cleared)
    assert found["largest_relative"] > 0


RIGHT = {
    "four updates in a step": {"update": "for _ in range(4): run.update(optimizer, loss, step)"},
    "options that follow the gradients": {
        "optimizer": "SGD",
        "update": "run.backward(optimizer, loss, step); "
        "optimizer.param_groups[0]['lr'] = float(model.last.weight.grad.norm()); optimizer.step()",
    },
    "a tracked clock": {
        "after": "clock.now = time.time()",
        "optimizer": "SGD",
    },
}


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("four updates in a step", "bf16"),
        ("options that follow the gradients", "none"),
        ("a tracked clock", "none"),
    ],
)
def test_what_rounding_or_a_clock_changes_is_no_mistake(
    name: str, compression: str, tmp_path: Path
) -> None:
    verdict_on(tmp_path, f"compression={compression}", code=0, **RIGHT[name])


WRONG = {
    "gradients of sgd at a small rate": {
        "optimizer": "SGD",
        "rate": " * 0.01",
        "update": "run.backward(optimizer, loss, step); [p.grad.mul_(world) for p in model.parameters() if p.grad is not None]; optimizer.step()",
    },
    "a weight that gets no gradient": {
        "after": "model.unused.weight.data.mul_(1 + 9 * (world > 1))"
    },
    "a buffer beside a large one": {"after": "model.norm.running_mean.mul_(1 + 0.5 * (world > 1))"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_that_moves_the_weights_little_is_found(name: str, tmp_path: Path) -> None:
    found = verdict_on(tmp_path, code=1, **WRONG[name])
    assert found["difference"]["relative"] > 1e-2


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
