"""Scores that are replayed as CUDA graphs, from the second evaluation with the same function on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.nest import form_of, leaves_of, map_leaves
from paceline.exact.script_values import ScriptValues

ToRow = Callable[[Any], Tensor | None]
"""to_row(batch) -> the sums and counts of the scores of a batch, on the GPU."""


class _CapturedScore:
    """The score of batches of one shape, with the memory that it reads and writes."""

    def __init__(self, to_row: ToRow, batch: Any, device: torch.device, pool: Any) -> None:
        self._inputs = map_leaves(Tensor.clone, batch)
        self._generator, self._graph = torch.Generator(device), torch.cuda.CUDAGraph()
        self._graph.register_generator_state(self._generator)
        default = torch.cuda.default_generators[device.index or 0]
        state = default.graphsafe_get_state()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                default.graphsafe_set_state(self._generator)
                self._row = to_row(self._inputs)
        finally:
            default.graphsafe_set_state(state)

    def replay(self, batch: Any, seed: int) -> Tensor | None:
        torch._foreach_copy_(list(leaves_of(self._inputs)), list(leaves_of(batch)))
        self._generator.manual_seed(seed)
        self._graph.replay()
        return None if self._row is None else self._row.clone()


class CapturedScores:
    """The captured scores of one function over models whose weights stay in their memory.

    The first batch of each form is compared with an eager result in every pass. If it differs, or cannot be captured,
    evaluation stays eager.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._key: tuple[Any, ...] = ()
        self._passes = 0
        self.names: list[str] | None = None
        """The names of the values in every row."""
        self._captured: dict[Any, _CapturedScore | None] = {}
        self._unchecked: set[Any] = set()
        self._every: list[nn.Module] = []

    def begin(self, score: Any, modules: Sequence[nn.Module]) -> None:
        """Begin a pass; forget what was captured of another function, other numbers in it, or weights that lay elsewhere."""
        self._every = [module for model in modules for module in model.modules()]
        tensors = [value for model in modules for value in (*model.parameters(), *model.buffers())]
        key = (score, ScriptValues(score).now(), *(value.data_ptr() for value in tensors))
        self._passes = self._passes + 1 if key == self._key else 0
        if not self._passes:
            self._key = key
            self._captured.clear()
        self._unchecked = set(self._captured)

    def replay(self, batch: Any, seed: int) -> Tensor | None:
        """Return the row of a batch; None if there is no graph for it, or it must be compared first."""
        form = form_of(batch)
        captured = self._captured.get(form)
        return captured.replay(batch, seed) if captured and form not in self._unchecked else None

    def learn(self, to_row: ToRow, batch: Any, seed: int, row: Tensor | None) -> None:
        """Capture a score of which the eager row is known, or compare it, for the batches that follow."""
        form = form_of(batch)
        if not self._passes or row is None:
            return
        if form not in self._captured:
            self._captured[form] = self._capture(to_row, batch)
        captured = self._captured[form]
        self._unchecked.discard(form)
        if captured is not None and not _is_replayed(captured, batch, seed, row):
            self._captured[form] = None

    def _capture(self, to_row: ToRow, batch: Any) -> _CapturedScore | None:
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves_of(batch)):
            return None
        before = self._writes()
        try:
            captured = _CapturedScore(to_row, batch, self._device, self._pool)
        except Exception:  # noqa: BLE001 - CUDA and user code raise anything: evaluate without a graph
            return None
        if self._writes() != before or any(module.training for module in self._every):
            return None  # the eager evaluation restores buffers and modes between batches
        return captured

    def _writes(self) -> list[tuple[int, int]]:
        """Return what changes if forward writes to a buffer or assigns one."""
        return [
            (id(value), value._version)  # noqa: SLF001 - torch's count of writes
            for module in self._every
            for value in module._buffers.values()  # noqa: SLF001 - its own, not its children's
            if value is not None
        ]


def _is_replayed(captured: _CapturedScore, batch: Any, seed: int, row: Tensor) -> bool:
    """Return whether a replay gives every bit of an eager row."""
    again = captured.replay(batch, seed)
    return again is not None and torch.equal(row.view(torch.int64), again.view(torch.int64))
