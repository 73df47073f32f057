"""torch.utils.checkpoint, reentrant or not: every gradient arrives, with the same bits on any number of ranks.

A reentrant checkpoint runs a backward inside of the backward and writes a gradient once per use. So a bucket may be
sent only when the last write has come, and lanes may not be added while one of them is still being written.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, TrainingError
from paceline.exact import buckets
from paceline.exact.buckets import make_buckets
from paceline.exact.state import state_digest
from paceline.world.world import World
from support.loops import fit
from support.processes import in_worlds, on_processes, run_on_processes

SETTINGS = {"batch.global_size": 24, "batch.lanes": 4, "steps": 6}
_SHAPES = {
    "once": (1, 0),
    "twice": (2, 0),
    "four times": (4, 0),
    "twice, and outside": (2, 1),
    "once, and outside": (1, 1),
}


class Again(nn.Module):
    """A network that applies one block several times inside of checkpoints, and outside of them."""

    def __init__(self, inside: int, outside: int, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.last = nn.Linear(8, 2)
        self._inside, self._outside, self._reentrant = inside, outside, reentrant

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for _ in range(self._inside):
            hidden = checkpoint(self.blocks[0], hidden, use_reentrant=self._reentrant)
        for _ in range(self._outside):
            hidden = self.blocks[0](hidden)
        chunks = [
            checkpoint(self.last, part, use_reentrant=self._reentrant) for part in hidden.chunk(2)
        ]
        return torch.cat(chunks)


def many_buckets(parameters: list[nn.Parameter]) -> list[list[int]]:
    return make_buckets(parameters, first_bytes=4, other_bytes=4)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(96, 6, generator=generator), torch.randn(96, 2, generator=generator)


def learned(config: RunConfig, world: World, *, reentrant: bool, names: list[str]) -> list[str]:
    buckets.make_buckets = many_buckets
    models = [Again(*_SHAPES[name], reentrant=reentrant) for name in names]
    return [fit(world, config, model, data()).digest for model in models]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpointed_block_learns_the_same_bits_however_often_it_is_used(reentrant, tmp_path):
    given = {"reentrant": reentrant, "names": list(_SHAPES)}
    in_worlds(learned, tmp_path, SETTINGS, given, (1, 2, 4) if reentrant else (1, 3))


def test_it_does_so_without_the_exact_sum_and_in_shards(tmp_path: Path) -> None:
    names = ["twice", "twice, and outside"]
    for reentrant, lanes, other in (  # of two numbers there is one sum
        (True, 2, {"exact": False}),
        (False, 4, {"parallel": "fsdp"}),
    ):
        given = {"reentrant": reentrant, "names": names}
        settings = SETTINGS | {"batch.lanes": lanes}
        [alone] = run_on_processes(learned, 1, tmp_path, settings, given)
        assert run_on_processes(learned, 2, tmp_path, settings | other, given) == [alone] * 2


class _Late(torch.autograd.Function):
    """The identity; its backward writes a gradient again that other code has computed already."""

    @staticmethod
    def forward(context, value: Tensor, hidden: list[nn.Parameter]) -> Tensor:
        [context.parameter] = hidden  # in a list: torch would wait for the gradient of an argument
        return value.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        if context.parameter.grad is not None:
            context.parameter.grad.add_(1.0)
        return gradient, None


@on_processes(2, **{**SETTINGS, "batch.lanes": 2})
def test_a_gradient_that_is_written_after_it_was_sent_ends_the_run(config, world) -> None:
    buckets.make_buckets = many_buckets

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = nn.Linear(6, 8), nn.Linear(8, 8)
            self.last = nn.Linear(8, 2, bias=False)

        def forward(self, features: Tensor) -> Tensor:
            return self.last(self.middle(_Late.apply(self.first(features), [self.last.weight])))

    with pytest.raises(TrainingError, match=r"last\.weight"):
        fit(world, config, Model(), data())


@on_processes(1, **SETTINGS)
def test_a_block_that_is_used_again_in_some_lanes_only_is_refused(config, world) -> None:
    class Sometimes(Again):
        def forward(self, features: Tensor) -> Tensor:
            self._inside = 3 - self._inside
            return super().forward(features)

    # The second lane of a pair writes the block twice into the sum with the first one.
    with pytest.raises(TrainingError, match=r"blocks\.0"):
        fit(world, config, Sometimes(2, 0, reentrant=True), data())


@on_processes(1, **SETTINGS)
def test_a_loss_that_calls_backward_is_refused(config, world) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        output.square().mean().backward(retain_graph=True)
        return mse_loss(output, target)

    with pytest.raises(ConfigError, match="backward"):
        fit(world, config, nn.Linear(6, 2), data(), loss=loss)


def captured(words: list[str], reentrant: bool) -> str:
    """Train on a GPU; return the digest."""
    fixed = ["device=cuda", "steps=12", "batch.global_size=24", "batch.lanes=4"]
    with paceline.Run(config_from_words(RunConfig, [*fixed, *words])) as run:
        model = run.model(Again(2, 1, reentrant=reentrant))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            return mse_loss(model(batch[0]), batch[1])

        for step in run.steps(data()):
            run.update(optimizer, loss, step)
        return state_digest(model, optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_on_a_gpu_it_learns_the_same_bits_captured_compiled_and_on_two_ranks(reentrant, tmp_path):
    def learned_by(size: int, *words: str) -> set[str]:
        given = {"words": words, "reentrant": reentrant}
        return set(run_on_processes(captured, size, tmp_path, {}, given))

    for compiles in ("compile=false", "compile=true"):
        eager = learned_by(1, compiles, "capture=false")
        for size, backend in [(1, "gloo"), (2, "gloo"), (2, "nccl"), (4, "nccl")]:
            found = learned_by(size, compiles, "capture=auto", f"backend={backend}")
            assert found == eager, (compiles, size, backend)
