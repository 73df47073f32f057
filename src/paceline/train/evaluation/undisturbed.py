"""Run models without training them: in eval mode, with whole weights, and afterwards everything is as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.exact.precision import Precision
from paceline.exact.strategy import Strategy
from paceline.train.observers.console import say
from paceline.world.collectives import sum_across
from paceline.world.randomness import same_generators
from paceline.world.world import World

_SHARE = 0.5  # of the free GPU memory; the score needs the rest


class _Buffer:
    """A buffer of a module, and its value before an evaluation."""

    def __init__(self, module: nn.Module, key: str, value: Tensor) -> None:
        self._module, self._key, self._value = module, key, value
        self._before, self._version = value.clone(), value._version  # noqa: SLF001 - torch's count of writes
        self._is_statistic = hasattr(module, "running_mean")

    def restore(self) -> None:
        """Undo what forward has written or assigned; a cache that has grown stays, as its module believes."""
        now = self._module._buffers.get(self._key)  # noqa: SLF001
        is_cache = self._key in self._module._non_persistent_buffers_set  # noqa: SLF001 - no public way
        if is_cache and now is not None and now.shape != self._value.shape:
            self._value, self._before, self._version = now, now.clone(), now._version  # noqa: SLF001
        self._module._buffers[self._key] = self._value  # noqa: SLF001 - torch has no public table of a module's own buffers
        # In train mode BatchNorm writes its statistics without a trace in the version counter.
        unseen = self._is_statistic and self._module.training
        if unseen or self._value._version != self._version:  # noqa: SLF001
            self._value.copy_(self._before)
            self._version = self._value._version  # noqa: SLF001


def _buffers_of(module: nn.Module) -> Iterator[_Buffer]:
    for key, value in module._buffers.items():  # noqa: SLF001 - its own, not its children's
        if value is not None:
            yield _Buffer(module, key, value)


@contextlib.contextmanager
def undisturbed(
    modules: Sequence[nn.Module], precision: Precision, *, fast_attention: bool = True
) -> Iterator[Callable[[], None]]:
    """Put modules into eval mode; give each back its mode, its buffers and the state of the generators.

    It yields a function that does so between two batches: a batch must not depend on those before it, which another
    rank may have evaluated. Without `fast_attention` torch's encoder layers use the same kernels as in training.
    """
    every = {module for model in modules for module in model.modules()}
    modes = {module: module.training for module in every}
    buffers = [buffer for module in every for buffer in _buffers_of(module)]

    def begin_batch() -> None:
        for buffer in buffers:
            buffer.restore()
        if any(module.training for module in every):
            for model in modules:
                model.eval()

    with same_generators(), _attention(fast=fast_attention):
        for model in modules:
            model.eval()
            precision.begin(model)
        try:
            with torch.no_grad():
                yield begin_batch
        finally:
            begin_batch()
            for model in modules:
                precision.finish(model)
            for module, training in modes.items():
                module.training = training


@contextlib.contextmanager
def _attention(*, fast: bool) -> Iterator[None]:
    """Allow or forbid the fused kernels of nn.TransformerEncoderLayer, which it uses only if it has no hooks: not under FSDP."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and fast)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class WholeWeights:
    """Gathers the weights of sharded models for the time of an evaluation.

    Forward is then free of collectives, so a score may call it as often as it likes: text generation ends after a
    different number of tokens on each rank. Models too large for that are gathered unit by unit in every forward.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self._world, self._are_sharded = world, strategy.shards
        self._bytes_each = 2 if strategy.gathers_bf16 else 4
        self._said = False

    @contextlib.contextmanager
    def gathered(self, modules: Sequence[nn.Module]) -> Iterator[bool]:
        """Gather weights if they fit; yield whether all forwards are free of collectives. Every rank must call this."""
        if not self._are_sharded:
            yield True
            return
        fits = self._fit(modules)
        if not fits:
            self._explain()
            yield False
            return
        units = _units_of(modules)
        for unit, _ in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield True
        finally:
            for unit, is_root in units:
                unit.reshard()
                # As fully_shard sets it: a root keeps its weights until backward.
                unit.set_reshard_after_forward(not is_root, recurse=False)

    def _fit(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether the whole weights fit into the memory of every rank. Every rank must call this."""
        device, lacks = self._world.device, 0.0
        if device != "cpu":
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            count = sum(value.numel() for model in modules for value in model.parameters())
            lacks = float(count * self._bytes_each > _SHARE * free)
        return not float(sum_across(self._world, torch.tensor([lacks], dtype=torch.float64)))

    def _explain(self) -> None:
        if self._world.is_main and not self._said:
            say(
                "evaluation: the whole model does not fit beside the training, so weights are gathered in every "
                "forward; call forward equally often on every rank"
            )
        self._said = True


def _units_of(modules: Sequence[nn.Module]) -> list[tuple[Any, bool]]:
    """Return the FSDP units of models, and whether each is the root."""
    from torch.distributed.fsdp import FSDPModule

    found: list[tuple[Any, bool]] = []
    for model in modules:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        found += [(unit, unit is model) for unit in units]
    return found
