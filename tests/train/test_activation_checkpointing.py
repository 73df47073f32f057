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
from paceline.train.gradients import gradient_sum
from paceline.train.gradients.gradient_buckets import make_buckets
from paceline.train.saving.state import state_digest
from paceline.world.world import World
from support.loops import fit
from support.processes import on_processes, run_on_processes

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
    gradient_sum.make_buckets = many_buckets
    models = [Again(*_SHAPES[name], reentrant=reentrant) for name in names]
    return [fit(world, config, model, data()).digest for model in models]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpointed_block_learns_the_same_bits_however_often_it_is_used(
    reentrant: bool, tmp_path: Path
) -> None:
    given = {"reentrant": reentrant, "names": list(_SHAPES)}
    found = [
        digests
        for size in ((1, 2, 4) if reentrant else (1, 3))
        for digests in run_on_processes(learned, size, tmp_path, SETTINGS, given)
    ]
    assert all(digests == found[0] for digests in found), found


def test_it_does_so_without_the_exact_sum_and_in_shards(tmp_path: Path) -> None:
    names = ["twice", "twice, and outside"]
    free = {**SETTINGS, "exact": False, "batch.lanes": 2}  # two numbers have one sum
    given = {"reentrant": True, "names": names}
    alone, *_ = run_on_processes(learned, 1, tmp_path, {**SETTINGS, "batch.lanes": 2}, given)
    for found in run_on_processes(learned, 2, tmp_path, free, given):
        assert found == alone
    sharded = {**SETTINGS, "parallel": "fsdp"}
    given = {"reentrant": False, "names": names}
    whole, *_ = run_on_processes(learned, 1, tmp_path, SETTINGS, given)
    for found in run_on_processes(learned, 2, tmp_path, sharded, given):
        assert found == whole


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
    gradient_sum.make_buckets = many_buckets

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


def captured(words: list[str], reentrant: bool) -> tuple[str, int]:
    """Train on a GPU; return the digest and the number of captured updates."""
    config = config_from_words(
        RunConfig,
        ["device=cuda", "steps=12", "batch.global_size=24", "batch.lanes=4", *words],
    )
    with paceline.Run(config) as run:
        model = run.model(Again(2, 1, reentrant=reentrant))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            return mse_loss(model(batch[0]), batch[1])

        for step in run.steps(data()):
            run.update(optimizer, loss, step)
        count = len(getattr(run._loop.updates, "_captured", ()))
        return state_digest(model, optimizer), count


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_on_a_gpu_it_learns_the_same_bits_captured_compiled_and_on_two_ranks(
    reentrant: bool, tmp_path: Path
) -> None:
    for compiles in ("compile=false", "compile=true"):
        eager, *_ = run_on_processes(
            captured,
            1,
            tmp_path,
            {},
            {"words": [compiles, "capture=false"], "reentrant": reentrant},
        )
        for size, backend in [(1, "gloo"), (2, "gloo"), (2, "nccl"), (4, "nccl")]:
            given = {"words": [compiles, "capture=auto", f"backend={backend}"]}
            given["reentrant"] = reentrant
            for digest, _ in run_on_processes(captured, size, tmp_path, {}, given):
                assert digest == eager[0], (compiles, size, backend)
