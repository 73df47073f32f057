"""How the lane gradients of an FSDP model are added in `Run.update`: FSDP scatters them, along the tree."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.bucket_exchange import AllGatherExchange, TreeShape
from paceline.train.fsdp_reduction import LaneSchedule, TreeScatter, prepared_units
from paceline.train.lane_sum import drop_gradients
from paceline.train.note import Note, merge_notes
from paceline.train.shard_mesh import shard_mesh_of
from paceline.world.collectives import wire_device
from paceline.world.world import World


class ShardedSum:
    """Adds the gradients of all lanes of an update into the shards of `grad`."""

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World
    ) -> None:
        mesh = shard_mesh_of(model)
        self._parameters, self._schedule = parameters, LaneSchedule(lanes, world, mesh)
        self._merges = merges_after(share(lanes, world.rank, world.size), lanes)
        self._shape, self._wire = TreeShape.of(lanes, world), wire_device(world)
        self._notes: list[Note] = []
        self._lane = 0
        self._scatters = []
        for unit in prepared_units(model, world):
            self._scatters.append(TreeScatter(self._schedule, mesh, self._wire))
            unit.set_custom_reduce_scatter(self._scatters[-1])  # type: ignore[arg-type]
        self.idle = self._schedule.idle

    def begin(self) -> None:
        """Start an update without gradients."""
        self._schedule.now = self._lane = 0
        self._notes = []
        for scatter in self._scatters:
            scatter.begin()

    def before_lane(self, *, last: bool) -> None:
        """Drop the gradient that FSDP wrote for the lane before: it is not a sum yet."""
        drop_gradients(self._parameters)
        self._schedule.now = self.idle + self._lane
        self._lane += 1
        assert last is (self._schedule.now == self._schedule.last)

    def after_lane(self, note: Note) -> None:
        """Keep the note; the gradients are scattered already."""
        self._notes.append(note)

    def finish(self, note: Note) -> Note:
        """Return the sum of the notes; FSDP has written the gradients."""
        notes = merge_notes([*self._notes, note], self._merges)
        tensors = [each.to_tensor() for each in notes]
        nothing = torch.empty(0, device=self._wire)
        message = AllGatherExchange(nothing, len(tensors[0]), self._shape, self._wire)
        message.start([nothing] * len(tensors), tensors)
        message.advance(nothing)
        return Note.from_tensor(message.total_note().cpu())


def refuse_several(models: int, optimizers: int) -> None:
    """Refuse what FSDP's own backward cannot do."""
    if models > 1 or optimizers > 1:
        raise ConfigError(
            f"parallel=fsdp trains one model with one optimizer; this run has {models} and {optimizers}",
            fix="set parallel=ddp",
        )
