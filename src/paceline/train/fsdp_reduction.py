"""How lane gradients of a model in slices are added: along the fixed tree, or as FSDP does it.

Every lane's gradient of a unit is sent in slices as soon as it is there: each rank adds one slice of all lanes, along the
tree. So with `exact` the bits are those of one rank alone and of DDP, for any number of lanes, ranks and copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from paceline.config import RunConfig
from paceline.scale.batch import share
from paceline.scale.tree import additions_by_turn, whole_subtrees
from paceline.train.bucket_exchange import AllGatherExchange, TreeShape, choose_exchange
from paceline.train.lane_sum import FreeSum, TreeStack, drop_gradients
from paceline.train.note import Note
from paceline.train.shard_mesh import ShardMesh, shard_mesh_of
from paceline.world.collectives import exchange, gather, wire_device
from paceline.world.world import World


class _Memory:
    """Where FSDP's messages lie."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeScatter(_Memory):
    """One unit's reduce-scatter: the slice of the sum of all lanes, added along the tree as they come, turn by turn.

    Lanes are added among the ranks that share a copy. What they cannot add by themselves crosses to the other copies once
    a step, with the last lane: as many bytes as an all-reduce of the slice where the lanes of a copy are a whole subtree.
    """

    def __init__(self, turns: LaneSchedule, copies: ShardMesh, wire: torch.device) -> None:
        self._turns, self._copies, self._wire = turns, copies, wire
        self._held: dict[int, Tensor] = {}
        """Sums of whole subtrees by their first lane. At one lane a rank they do not outlive a call."""
        self._served = -1

    def begin(self) -> None:
        """Forget the step before."""
        self._held.clear()
        self._served = -1

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Send each rank its slice of this lane's gradient. With the last lane, leave the sum of all: before, nothing."""
        turn = self._turns.now
        assert (
            turn != self._served
        )  # a unit that is used twice in a forward has one gradient all the same
        self._served = turn
        for lane, row in zip(self._turns.lanes_in(turn), self._rows(input_tensor), strict=True):
            if lane is not None:
                self._held[lane] = row
        for to, source in self._turns.additions[turn]:
            self._held[to].add_(self._held.pop(source))
        if turn == self._turns.last:
            self._leave_sum(
                [self._held.pop(node.start) for node in self._turns.nodes], output_tensor
            )

    def _leave_sum(self, sums: list[Tensor], total: Tensor) -> None:
        """Add the sums that are left in every copy."""
        if self._copies.across is None:
            total.copy_(sums[0])
            return
        crossing = choose_exchange(total, 0, self._turns.shape, self._wire, self._copies.across)
        crossing.start(sums, [])
        while not crossing.advance(total):
            pass

    def _rows(self, gradient: Tensor) -> list[Tensor]:
        """Return my slice of the gradient of each lane that runs now in this copy."""
        size = len(self._turns.shares)
        sent = gradient.to(self._wire)
        received = torch.empty_like(sent)
        pieces = [sent.numel() // size] * size
        exchange(received, sent, pieces, pieces, self._copies.inside).wait()
        return list(received.to(gradient.device).view(size, -1))


class HostGather(_Memory):
    """An all-gather through the memory of the host, for a backend that moves no other."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any
    ) -> None:
        """Collect the slices of all ranks of a copy."""
        gathered = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        gather(gathered, input_tensor.cpu(), group).wait()
        output_tensor.copy_(gathered)


class LaneSchedule:
    """Who of a copy runs which lane when. Every one of them runs as many, as all must take part in every gathering of weights.

    A rank with fewer lanes than others is idle in the first turn: it runs a lane whose gradient nobody adds.
    """

    def __init__(self, lanes: int, world: World, copies: ShardMesh) -> None:
        everyone = [share(lanes, rank, world.size) for rank in range(world.size)]
        self.shares = [everyone[rank] for rank in copies.mine]
        most = len(self.shares[0])
        self.idle = most - len(everyone[world.rank])
        self.last = most - 1
        self.now = 0
        by_copy = [
            range(everyone[ranks.start].start, everyone[ranks.stop - 1].stop)
            for ranks in copies.rows
        ]
        turns = [most - mine.stop + lane for mine in self.shares for lane in mine]
        self.additions = additions_by_turn(turns, by_copy[copies.row].start, lanes)
        self.nodes = whole_subtrees(by_copy[copies.row], lanes)
        """What the lanes of this copy add up to by themselves."""
        self.shape = TreeShape.over(by_copy, lanes, copies.row)
        """How the sums of all copies become the total."""

    def lanes_in(self, turn: int) -> list[int | None]:
        """Return the lane of each rank in this turn; None: it is idle."""
        lanes = [mine.stop - 1 - self.last + turn for mine in self.shares]
        return [
            lane if lane in mine else None for lane, mine in zip(lanes, self.shares, strict=True)
        ]


class ShardedTree:
    """The lane sum of a sharded model, along the tree."""

    scale = 1.0
    totals_are_global = True

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World
    ) -> None:
        copies = shard_mesh_of(model)
        self._parameters, self._turns = parameters, LaneSchedule(lanes, world, copies)
        self._stack, self._notes = TreeStack([], lanes, world.rank, world.size), list[Note]()
        self._shape, self._wire = TreeShape.of(lanes, world), wire_device(world)
        self._scatters = []
        for unit in prepared_units(model, world):
            self._scatters.append(TreeScatter(self._turns, copies, self._wire))
            unit.set_custom_reduce_scatter(self._scatters[-1])  # type: ignore[arg-type]
        self.idle = self._turns.idle

    def begin(self) -> None:
        """Start a step with no gradients."""
        self._turns.now = 0
        self._notes.clear()
        for scatter in self._scatters:
            scatter.begin()

    def before_lane(self, note: Note) -> None:
        """Take a lane's note; the last one sends them all. What FSDP left as gradient before is no sum yet."""
        drop_gradients(self._parameters)
        self._turns.now = self.idle + len(self._notes)
        self._notes.append(note)
        if self._turns.now == self._turns.last:
            self._stack.replace_notes(self._notes)
            self._send_notes([held.to_tensor() for held in self._stack.notes])

    def after_lane(self) -> None:
        """Do nothing: the gradients are with their slices."""

    def finish(self) -> Note:
        """Return the sum of the notes; FSDP has put the gradients in place."""
        self._exchange.advance(self._nothing)
        return Note.from_tensor(self._exchange.total_note().cpu())

    def total(self, note: Note) -> Note:
        """Return the note: it is the sum of all ranks."""
        return note

    def _send_notes(self, notes: list[Tensor]) -> None:
        self._nothing = torch.empty(0, device=self._wire)
        self._exchange = AllGatherExchange(self._nothing, len(notes[0]), self._shape, self._wire)
        self._exchange.start([self._nothing] * len(notes), notes)


class ShardedFree(FreeSum):
    """The lane sum of a sharded model, in the backend's own order: FSDP adds slice to slice, and copy to copy at the end."""

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World
    ) -> None:
        super().__init__(parameters, world)
        self.scale = 1.0
        self._units = prepared_units(model, world)
        turns = LaneSchedule(lanes, world, shard_mesh_of(model))
        self.idle, self._last = turns.idle, turns.last
        self._turn = 0

    def begin(self) -> None:
        """Start a step with no gradients."""
        super().begin()
        self._turn = self.idle
        self._cross_if(last=False)

    def before_lane(self, note: Note) -> None:
        """Keep the note; the last lane's backward takes the sum of all to the other copies."""
        super().before_lane(note)
        self._cross_if(last=self._turn == self._last)
        self._turn += 1

    def _cross_if(self, *, last: bool) -> None:
        for unit in self._units:
            unit.set_requires_all_reduce(last, recurse=False)


def sums_along_tree(world: World, config: RunConfig) -> bool:
    """Return whether gradients of slices are added here: for exact bits, and where torch's own messages find no way."""
    return config.exact or wire_device(world).type != torch.device(world.device).type


def prepared_units(model: nn.Module, world: World) -> list[FSDPModule]:
    """Return the units of a sharded model, which from now on send sums, not means, and through the host where they must."""
    units: list[FSDPModule] = [
        module for module in model.modules() if isinstance(module, FSDPModule)
    ]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if wire_device(world).type != torch.device(world.device).type:
            unit.set_custom_all_gather(HostGather())  # type: ignore[arg-type]
    return units
