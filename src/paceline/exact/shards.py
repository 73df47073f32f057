"""How the lane gradients of an FSDP model are added: FSDP scatters them, along the tree or in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule

from paceline.errors import ConfigError
from paceline.exact.exchange import TreeShape, choose_exchange, sum_of_rows
from paceline.exact.fsdp import ShardMesh, reshard, shard_mesh_of
from paceline.exact.row import Rows, merge_rows
from paceline.scale.batch import share
from paceline.scale.tree import additions_by_turn, merges_after, whole_subtrees
from paceline.world.collectives import (
    all_gather_flat,
    all_gather_rows,
    exchange,
    gather,
    sum_across,
    wire_device,
)
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
        self._lanes = 0
        """Lanes of this update so far."""
        self._rows: Rows
        self._scatters = []
        self._model = model
        self._order = UnitOrder(mesh.shard_group, self._schedule.last + 1)
        names = {value: name for name, value in model.named_parameters()}
        self._names = [names[value] for value in parameters]
        for name, unit in prepared_units(model, world, self._order).items():
            scatter = TreeScatter(name, self._order, self._schedule, mesh, self._wire)
            self._scatters.append(scatter)
            unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        self.extra_lanes = self._schedule.extra_lanes

    def close(self) -> None:
        """Do nothing: the units call the newest sum only."""

    def begin(self) -> None:
        """Start an update without gradients."""
        self._schedule.now = self._lanes = 0
        for scatter in self._scatters:
            scatter.begin()
        drop_gradients(self._parameters)
        reshard(self._model)  # user code may have left gathered weights
        self._order.begin_update()

    def before_lane(self, rows: Rows, *, last: bool) -> None:
        """Drop the gradient that FSDP wrote for the lane before: it is not a sum yet."""
        drop_gradients(self._parameters)
        self._rows = rows
        self._schedule.now = self.extra_lanes + self._lanes
        self._lanes += 1
        assert last is (self._schedule.now == self._schedule.last)

    def after_lane(self) -> None:
        """Check the lane: its gradients are scattered already."""
        self._order.end_lane(self._without_gradient())

    def _without_gradient(self) -> list[str]:
        pairs = zip(self._names, self._parameters, strict=True)
        return [name for name, value in pairs if value.grad is None]

    def finish(self) -> Tensor:
        """Return the sum of the rows; FSDP has written the gradients."""
        self._order.end_update(self._without_gradient())
        largest = self._rows.layout.largest
        rows = merge_rows(self._rows.of_lanes, self._merges, largest)
        return sum_of_rows(rows, self._shape, self._wire, largest)

    def drop_missing(self, ranks: float) -> None:
        """Do nothing: all lanes have the same layers."""


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
        self.extra_lanes = schedule.extra_lanes
        self._rows: Rows

    def close(self) -> None:
        """Do nothing: the units call the newest sum only."""

    def begin(self) -> None:
        """Start an update without gradients."""
        drop_gradients(self._parameters)
        self._all_reduce_if(last=False)
        reshard(self._model)  # user code may have left gathered weights
        self._order.begin_update()

    def before_lane(self, rows: Rows, *, last: bool) -> None:
        """Let the last lane's backward add the sums of all shard groups."""
        self._rows = rows
        self._all_reduce_if(last=last)

    def after_lane(self) -> None:
        """Leave the gradients in the parameters."""
        self._order.end_lane()

    def finish(self) -> Tensor:
        """Return the sum of the rows; FSDP has written the gradients."""
        self._order.end_update()
        rows, largest = self._rows.numbers, self._rows.layout.largest
        total = sum_across(self._world, rows.sum(0))
        if largest:
            own = rows[:, -largest:].amax(0)
            total[-largest:] = all_gather_rows(self._world, own).amax(0)
        return total

    def drop_missing(self, ranks: float) -> None:
        """Do nothing: all lanes have the same layers."""

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


# How FSDP scatters the gradient of a lane along the fixed tree.
#
# The gradient of a unit is scattered as soon as a lane has computed it: each rank adds its shard of all lanes, along
# the tree. So with `exact` the bits are those of one rank and of parallel=ddp, for any number of lanes, ranks and shard groups.


class _Allocator:
    """Allocates FSDP's communication buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeScatter(_Allocator):
    """One unit's reduce-scatter: adds this rank's shard of all lanes along the tree, turn by turn.

    Lanes are added within a shard group. The remaining sums are exchanged between shard groups once per step, with
    the last lane: as many bytes as an all-reduce of the shard, if the lanes of a group are a whole subtree.
    """

    def __init__(
        self,
        unit: str,
        order: UnitOrder,
        schedule: LaneSchedule,
        mesh: ShardMesh,
        wire: torch.device,
    ) -> None:
        self._unit, self._order = unit, order
        self._schedule, self._mesh, self._wire = schedule, mesh, wire
        self._sums: dict[int, Tensor] = {}
        """Sums of whole subtrees by their first lane. With one lane per rank they do not outlive a call."""
        self._last_turn = -1

    def begin(self) -> None:
        """Discard the previous step."""
        self._sums.clear()
        self._last_turn = -1

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Send each rank its shard of this lane's gradient. Only the last lane writes the sum to the output."""
        self._order.check("reduced", self._unit, input_tensor.numel())
        schedule, turn = self._schedule, self._schedule.now
        assert turn != self._last_turn  # a unit has one gradient per lane, however often it is used
        self._last_turn = turn
        lanes = schedule.lanes_in(turn)
        for lane, shard in zip(lanes, self._scatter(input_tensor), strict=True):
            if lane is not None:
                self._sums[lane] = shard
        for to, source in schedule.additions[turn]:
            self._sums[to].add_(self._sums.pop(source))
        if turn == schedule.last:
            sums = [self._sums.pop(node.start) for node in schedule.nodes]
            self._sum_over_groups(sums, output_tensor)

    def _sum_over_groups(self, sums: list[Tensor], total: Tensor) -> None:
        group = self._mesh.replicate_group
        if group is None:
            total.copy_(sums[0])
            return
        reduction = choose_exchange(total, 0, self._schedule.shape, self._wire, group)
        reduction.start(sums, [])
        while not reduction.advance(total):
            pass

    def _scatter(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shard of the gradient of each lane that runs now in the shard group."""
        size = len(self._schedule.shares)
        sent = gradient.to(self._wire)
        received = torch.empty_like(sent)
        pieces = [sent.numel() // size] * size
        exchange(received, sent, pieces, pieces, self._mesh.shard_group).wait()
        return list(received.to(gradient.device).view(size, -1))


class UnitGather(_Allocator):
    """One unit's all-gather; through host memory for a backend that cannot send GPU memory."""

    def __init__(self, unit: str, order: UnitOrder, *, through_host: bool) -> None:
        self._unit, self._order, self._through_host = unit, order, through_host

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP's signature
    ) -> Work | None:
        """Collect the shards of all ranks of a shard group."""
        self._order.check("gathered", self._unit, output_tensor.numel())
        if not self._through_host:
            work = gather(output_tensor, input_tensor, group)
            if async_op:
                return work
            work.wait()
            return None
        gathered = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        gather(gathered, input_tensor.cpu(), group).wait()
        output_tensor.copy_(gathered)
        return None


class LaneSchedule:
    """Which rank of a shard group runs which lane in which turn. All take part in every turn, to gather weights.

    A rank with fewer lanes than others runs an extra lane in the first turn: one whose gradient is not used.
    """

    def __init__(self, lanes: int, world: World, mesh: ShardMesh) -> None:
        all_shares = [share(lanes, rank, world.size) for rank in range(world.size)]
        self.shares = [all_shares[rank] for rank in mesh.ranks]
        most = len(self.shares[0])
        self.extra_lanes = most - len(all_shares[world.rank])
        self.last = most - 1
        self.now = 0
        lanes_of_groups = []
        for ranks in mesh.groups:
            first, last = all_shares[ranks.start], all_shares[ranks.stop - 1]
            lanes_of_groups.append(range(first.start, last.stop))
        my_lanes = lanes_of_groups[mesh.number]
        turns = [most - lanes_of.stop + lane for lanes_of in self.shares for lane in lanes_of]
        self.additions = additions_by_turn(turns, my_lanes.start, lanes)
        self.nodes = whole_subtrees(my_lanes, lanes)
        """Subtrees that the lanes of this shard group form."""
        self.shape = TreeShape.over(lanes_of_groups, lanes, mesh.number)
        """How the sums of all shard groups are added."""

    def lanes_in(self, turn: int) -> list[int | None]:
        """Return the lane of each rank in this turn; None for an extra lane."""
        lanes: list[int | None] = []
        for lanes_of_rank in self.shares:
            lane = lanes_of_rank.stop - 1 - self.last + turn
            lanes.append(lane if lane in lanes_of_rank else None)
        return lanes


def prepared_units(model: nn.Module, world: World, order: UnitOrder) -> dict[str, FSDPModule]:
    """Return the FSDP units of a model by name, set to reduce sums instead of means, in a checked order."""
    through_host = wire_device(world).type != torch.device(world.device).type
    units: dict[str, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            units[name or "the rest of the model"] = module
    for name, unit in units.items():
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(UnitGather(name, order, through_host=through_host))  # type: ignore[arg-type]
    return units


# Check that all lanes of all ranks gather and reduce the same FSDP units in the same order.
#
# Every rank takes part in every exchange of a unit. A lane that skips a layer would make ranks wait for each other, or
# add the gradients of one layer to those of another of the same size.


_MOST_BYTES = 256


class _Exchange(NamedTuple):
    action: str
    unit: str
    elements: int

    def __str__(self) -> str:
        return f"{self.action} {self.unit}"


class UnitOrder:
    """Compares each exchange with that of the first lane; in the first update also with those of other ranks.

    All ranks of a shard group run the same number of lanes, so they agree in every lane. Another shard group may run
    fewer: all groups agree in the last lane, which is when they add their sums.
    """

    def __init__(self, shard_group: ProcessGroup, lanes: int) -> None:
        self._shard_group, self._lanes = shard_group, lanes
        self._expected: list[_Exchange] = []
        self._lane = self._next = 0
        self._is_first_lane = self._is_first_update = True
        self._in_lane = False

    def begin_update(self) -> None:
        """Expect the exchanges of the first lane."""
        self._lane = self._next = 0
        self._in_lane = True

    def check(self, action: str, unit: str, elements: int = 0) -> None:
        """Raise before an exchange in which the ranks would not agree; outside of updates do nothing."""
        if not self._in_lane:
            return
        found = _Exchange(action, unit, elements)
        if self._is_first_update:
            self._agree(found)
        if self._is_first_lane:
            self._expected.append(found)
        elif found != self._expected[self._next]:
            raise _other_layers(str(found), str(self._expected[self._next]))
        self._next += 1

    def end_lane(self, without_gradient: Iterable[str] = ()) -> None:
        """Raise if the lane had other exchanges, or other parameters without a gradient, than the first one."""
        self.check("had no gradients for", ", ".join(without_gradient) or "no parameter")
        self._is_first_lane = False
        self._lane, self._next = self._lane + 1, 0

    def end_update(self, without_gradient: Iterable[str] = ()) -> None:
        """End the last lane."""
        self.end_lane(without_gradient)
        self._is_first_update = self._in_lane = False

    def _agree(self, found: _Exchange) -> None:
        """Raise on all ranks of a group if one of them is about to do something else."""
        is_last = self._lane == self._lanes - 1
        text = f"{found} ({found.elements} elements)".encode()[:_MOST_BYTES].ljust(_MOST_BYTES)
        row = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = all_gather_flat(row, None if is_last else self._shard_group).view(-1, _MOST_BYTES)
        for other in rows:
            if not torch.equal(other, rows[0]):
                one, another = (
                    bytes(each.tolist()).decode(errors="replace") for each in (rows[0], other)
                )
                raise _other_layers(one.rstrip(), another.rstrip())


def _other_layers(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"parallel=fsdp needs the same layers in every lane, but one lane {one} where another {other}",
        fix="call every layer in every lane, and multiply what is to be skipped by 0; if a layer is checkpointed several times, pass "
        "use_reentrant=False to torch.utils.checkpoint.checkpoint; or set parallel=ddp",
    )
