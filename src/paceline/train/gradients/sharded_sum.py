"""How the lane gradients of an FSDP model are added: FSDP scatters them, along the tree or in its own order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.scale.batch import share
from paceline.scale.tree import merges_after
from paceline.train.gradients.bucket_exchange import TreeShape, sum_of_notes
from paceline.train.gradients.fsdp_reduction import LaneSchedule, TreeScatter, prepared_units
from paceline.train.gradients.note import Note, merge_notes
from paceline.train.gradients.unit_order import UnitOrder
from paceline.train.model.fsdp import settle
from paceline.train.model.shard_mesh import shard_mesh_of
from paceline.world.collectives import sum_across, wire_device
from paceline.world.world import World


class ShardedSum:
    """Adds the gradients of all lanes of an update into the shards of `grad`, along the tree."""

    is_complete = True

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World
    ) -> None:
        mesh = shard_mesh_of(model)
        self._parameters, self._schedule = parameters, LaneSchedule(lanes, world, mesh)
        self._merges = merges_after(share(lanes, world.rank, world.size), lanes)
        self._shape, self._wire = TreeShape.of(lanes, world), wire_device(world)
        self._notes: list[Note] = []
        self._scatters = []
        self._model = model
        self._order = UnitOrder(mesh.shard_group, self._schedule.last + 1)
        names = {value: name for name, value in model.named_parameters()}
        self._names = [names[value] for value in parameters]
        for name, unit in prepared_units(model, world, self._order).items():
            scatter = TreeScatter(name, self._order, self._schedule, mesh, self._wire)
            self._scatters.append(scatter)
            unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        self.idle = self._schedule.idle

    def close(self) -> None:
        """Do nothing: the units call the newest sum only."""

    def begin(self) -> None:
        """Start an update without gradients."""
        self._schedule.now = 0
        self._notes = []
        for scatter in self._scatters:
            scatter.begin()
        drop_gradients(self._parameters)
        settle(self._model)  # user code may have left gathered weights
        self._order.begin_update()

    def before_lane(self, note: Note, *, last: bool) -> None:
        """Keep the note; drop the gradient that FSDP wrote for the lane before: it is not a sum yet."""
        drop_gradients(self._parameters)
        self._schedule.now = self.idle + len(self._notes)
        self._notes.append(note)
        assert last is (self._schedule.now == self._schedule.last)

    def after_lane(self) -> None:
        """Check the lane: its gradients are scattered already."""
        self._order.end_lane(self._without_gradient())

    def _without_gradient(self) -> list[str]:
        pairs = zip(self._names, self._parameters, strict=True)
        return [name for name, value in pairs if value.grad is None]

    def finish(self) -> Note:
        """Return the sum of the notes; FSDP has written the gradients."""
        self._order.end_update(self._without_gradient())
        notes = [note.to_tensor() for note in merge_notes(self._notes, self._merges)]
        return Note.from_tensor(sum_of_notes(notes, self._shape, self._wire).cpu())


class FreeShardedSum:
    """Adds in the backend's order: FSDP adds within shard groups, then between them."""

    is_complete = True

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World
    ) -> None:
        self._parameters, self._world = parameters, world
        self._model, mesh = model, shard_mesh_of(model)
        if mesh.replicate_group is not None:
            refuse_uneven_lanes(lanes, world.size)
        schedule = LaneSchedule(lanes, world, mesh)
        self._order = UnitOrder(mesh.shard_group, schedule.last + 1)
        self._units = list(prepared_units(model, world, self._order).values())
        self.idle = schedule.idle
        self._total: Tensor | None = None

    def close(self) -> None:
        """Do nothing: the units call the newest sum only."""

    def begin(self) -> None:
        """Start an update without gradients."""
        drop_gradients(self._parameters)
        self._total = None
        self._all_reduce_if(last=False)
        settle(self._model)  # user code may have left gathered weights
        self._order.begin_update()

    def before_lane(self, note: Note, *, last: bool) -> None:
        """Add the note; the last lane's backward adds the sums of all shard groups."""
        own = note.to_tensor()
        self._total = own if self._total is None else self._total + own
        self._all_reduce_if(last=last)

    def after_lane(self) -> None:
        """Leave the gradients in the parameters."""
        self._order.end_lane()

    def finish(self) -> Note:
        """Return the sum of the notes; FSDP has written the gradients."""
        self._order.end_update()
        assert self._total is not None
        return Note.from_tensor(sum_across(self._world, self._total))

    def _all_reduce_if(self, *, last: bool) -> None:
        for unit in self._units:
            unit.set_requires_all_reduce(last, recurse=False)


def drop_gradients(parameters: list[nn.Parameter]) -> None:
    """Set `grad` to None, so that the next backward writes instead of accumulating."""
    for parameter in parameters:
        parameter.grad = None


def refuse_uneven_lanes(lanes: int, ranks: int, version: str = torch.__version__) -> None:
    """Refuse shard groups that accumulate different numbers of lanes before they are added.

    >>> refuse_uneven_lanes(5, 4, version="2.13.0")
    >>> refuse_uneven_lanes(8, 4, version="2.15.0")
    >>> refuse_uneven_lanes(5, 4, version="2.15.0")
    Traceback (most recent call last):
    paceline.errors.ConfigError: with torch 2.15.0, shard_over and exact=false, 5 lanes on 4 ranks would wait for ever
      fix: set batch.lanes=8, or exact=true
    """
    known = tuple(int(part) for part in version.split(".")[:2])
    if known >= (2, 15) and lanes % ranks:
        raise ConfigError(
            f"with torch {version}, shard_over and exact=false, {lanes} lanes on {ranks} ranks would wait for ever",
            fix=f"set batch.lanes={-(-lanes // ranks) * ranks}, or exact=true",
        )


def refuse_several(models: int, optimizers: int) -> None:
    """Refuse what FSDP's own backward cannot do."""
    if models > 1 or optimizers > 1:
        raise ConfigError(
            f"parallel=fsdp trains one model with one optimizer; this run has {models} and {optimizers}",
            fix="set parallel=ddp",
        )
