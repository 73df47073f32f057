"""What a captured update reads: the batches of its lanes, and a random generator for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.data.reading.batches import RankBatch
from paceline.data.reading.nest import leaves_of, map_leaves
from paceline.train.step.losses import LaneSeeds
from paceline.train.step.raw_copy import Destination
from paceline.world.randomness import mix


class CapturedInputs:
    """Memory that stays where it is from one replay to the next."""

    def __init__(self, step: RankBatch, device: torch.device) -> None:
        self.batches = [map_leaves(Tensor.clone, lane.batch) for lane in step.lanes]
        self._leaves: list[Tensor] = [leaf for batch in self.batches for leaf in leaves_of(batch)]
        self._device = device.index or 0
        groups: dict[torch.dtype, list[int]] = {}
        for place, leaf in enumerate(self._leaves):
            groups.setdefault(leaf.dtype, []).append(place)
        self._single = [
            (places[0], Destination(self._leaves[places[0]], self._device))
            for places in groups.values()
            if len(places) == 1  # the kernel for several copies 65,536 numbers per thread block
        ]
        self._several = [places for places in groups.values() if len(places) > 1]
        self._generators = [torch.Generator(device) for _ in step.lanes]
        self._default = torch.cuda.default_generators[self._device]

    def fill(self, step: RankBatch, seeds: LaneSeeds) -> None:
        """Copy the batches of a step, and seed the generators."""
        given = [leaf for lane in step.lanes for leaf in leaves_of(lane.batch)]
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # noqa: SLF001
        for place, destination in self._single:
            destination.fill(given[place], stream)
        for places in self._several:
            to = [self._leaves[place] for place in places]
            torch._foreach_copy_(to, [given[place] for place in places])
        for lane, generator in zip(step.lanes, self._generators, strict=True):
            generator.manual_seed(mix(*seeds.of(step.plan.index, lane.number)))

    @contextlib.contextmanager
    def drawn_by(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Let a graph that is recorded draw from the generators of the lanes."""
        state = self._default.graphsafe_get_state()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(state)

    def use_generator(self, row: int) -> None:
        """Draw from the generator of a lane from now on."""
        self._default.graphsafe_set_state(self._generators[row])
