"""How FSDP scatters the gradient of a lane along the fixed tree.

The gradient of a unit is scattered as soon as a lane has computed it: each rank adds its shard of all lanes, along
the tree. So with `exact` the bits are those of one rank and of parallel=ddp, for any number of lanes, ranks and shard groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule

from paceline.scale.batch import share
from paceline.scale.tree import additions_by_turn, whole_subtrees
from paceline.train.gradients.bucket_exchange import TreeShape
from paceline.train.gradients.exchange_choice import choose_exchange
from paceline.train.gradients.unit_order import UnitOrder
from paceline.train.model.shard_mesh import ShardMesh
from paceline.world.collectives import exchange, gather, wire_device
from paceline.world.world import World


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

    A rank with fewer lanes than others is idle in the first turn: it runs a lane whose gradient is not used.
    """

    def __init__(self, lanes: int, world: World, mesh: ShardMesh) -> None:
        all_shares = [share(lanes, rank, world.size) for rank in range(world.size)]
        self.shares = [all_shares[rank] for rank in mesh.ranks]
        most = len(self.shares[0])
        self.idle = most - len(all_shares[world.rank])
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
        """Return the lane of each rank in this turn; None for an idle rank."""
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
