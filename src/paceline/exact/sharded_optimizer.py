"""Find out by a trial whether an optimizer gives sharded weights the bits of whole ones.

Most optimizers compute element by element. Muon, Adafactor and others need whole matrices: their step on shards fails,
or gives other bits. The trial takes some steps of a copy of the optimizer on small tensors, sharded and whole.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim

from paceline.errors import ConfigError
from paceline.exact.sharded_tensor import is_sharded, shards_of, whole

_ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.ASGD,
}  # fmt: skip
"""Optimizers of torch that need no trial: `scripts/model_table.py` trains with each of them."""

_STEPS = 3
_MOST_COLUMNS = 3
_SEED = 20


def refuse_unfit(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the step of an optimizer needs weights that are not sharded. Every rank must call this."""
    if type(optimizer) in _ELEMENTWISE:
        return
    groups = list(_trial_values(optimizer))
    plain = [[nn.Parameter(value.clone()) for _, value in group] for group in groups]
    sharded = [[nn.Parameter(shards_of(value, like)) for like, value in group] for group in groups]
    _take_steps(_copy(optimizer, plain), plain)
    try:
        _take_steps(_copy(optimizer, sharded), sharded)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise _unfit(optimizer, f"fails on shards of a matrix: {reason}") from error
    for one, other in zip(plain, sharded, strict=True):
        for expected, found in zip(one, other, strict=True):
            if not torch.equal(expected, whole(found.detach())):
                raise _unfit(optimizer, "gives shards of a matrix other bits than the whole matrix")


def _unfit(optimizer: torch.optim.Optimizer, problem: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} does not support parallel=fsdp: its step {problem}",
        fix="set parallel=ddp, or use an optimizer that computes element by element, such as AdamW or SGD",
    )


def _trial_values(optimizer: torch.optim.Optimizer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for each group its first sharded parameter of every number of dimensions, with a small random value."""
    generator = torch.Generator().manual_seed(_SEED)
    for group in optimizer.param_groups:
        chosen = {value.ndim: value for value in reversed(group["params"]) if is_sharded(value)}
        found = []
        for like in chosen.values():
            rows = 2 * like.device_mesh.size() + 1  # the last shard is shorter
            shape = rows, *(min(_MOST_COLUMNS, length) for length in like.shape[1:])
            value = torch.randn(shape, generator=generator)
            found.append((like, value.to(like.device, like.dtype)))
        yield found


def _copy(
    optimizer: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return an optimizer with the same options and other parameters, which shares nothing with the original."""
    trial = copy.copy(optimizer)
    kept = {id(value): value for group in optimizer.param_groups for value in group["params"]}
    memo: dict[int, Any] = {**kept, id(optimizer): trial}
    pairs = zip(optimizer.param_groups, parameters, strict=True)
    groups = [{**group, "params": values} for group, values in pairs if values]
    for name, value in vars(optimizer).items():
        if name not in {"param_groups", "state"}:
            vars(trial)[name] = copy.deepcopy(value, memo)
    trial.param_groups, trial.state = groups, defaultdict(dict)
    return trial


def _take_steps(optimizer: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    for _ in range(_STEPS):
        for group in parameters:
            for value in group:
                gradient = torch.randn(value.shape, generator=generator).to(
                    value.device, value.dtype
                )
                value.grad = shards_of(gradient, value) if is_sharded(value) else gradient
        type(optimizer).step(optimizer)
