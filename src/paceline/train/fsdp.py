"""How a model is cut into slices, one for each rank (torch's `fully_shard`), and lane gradients are still added along the fixed tree.

Weights, gradients and optimizer state lie in slices. A unit's weights are gathered for its forward and its backward, and
every lane's gradient of it is sent in slices as soon as it is there: each rank adds one slice of all lanes, along the
tree. So with `exact` the bits are those of one rank alone and of DDP, for any number of lanes and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.scale.batch import share
from paceline.scale.tree import additions_by_turn
from paceline.train.exchange import GatherExchange, TreeShape
from paceline.train.precision import casts_weights
from paceline.train.reduction import FreeSum, Note, TreeStack, drop_gradients
from paceline.world.collectives import exchange, gather, wire_device
from paceline.world.facts import World

Wrap = tuple[type[nn.Module], ...]
_LONG = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # their statistics are fp32, and so must their weights be


def shard(model: nn.Module, world: World, config: RunConfig, wrap: Wrap | None) -> nn.Module:
    """Cut a model into slices, unit by unit, in place."""
    units = list(units_of(model, wrap))
    _refuse_shared_weights(model, units)
    mesh = DeviceMesh.from_group(group.WORLD, torch.device(world.device).type)  # type: ignore[arg-type]
    short, long = (torch.bfloat16, torch.float32) if casts_weights(config, world.size) else (None, None)
    for norm in (module for module in model.modules() if short and isinstance(module, _LONG)):
        fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(long, long, output_dtype=short))
    for unit in reversed([unit for unit in units if not isinstance(unit, FSDPModule)]):  # inner ones first
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(short, long))
    # What goes to the loss is long: it is no place for short numbers.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(short, long, output_dtype=long))
    return model.to(world.device)


def units_of(model: nn.Module, wrap: Wrap | None) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as a whole, outer ones first: those of the classes in `wrap`.

    Without it they are the members of every ModuleList, as a stack of layers is one.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    members = {child for layers in lists for child in layers if not isinstance(child, nn.ModuleList | nn.ModuleDict)}
    found = [
        module
        for module in model.modules()
        if module is not model and (module in members if wrap is None else isinstance(module, wrap))
    ]
    if wrap and not found:
        raise ConfigError(
            f"the model has no module of {', '.join(kind.__name__ for kind in wrap)}",
            fix="name in wrap= the class of its layers, or leave wrap= out",
        )
    yield from (module for module in found if any(True for _ in module.parameters()))


def settle(model: nn.Module) -> nn.Module:
    """Let a model have its slices as parameters again, wherever a forward without backward has left whole ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _refuse_shared_weights(model: nn.Module, units: list[nn.Module]) -> None:
    """Refuse a weight of two units, which would be cut twice, and weights that cannot be cut."""
    owner = {module: unit for unit in units for module in unit.modules()}  # the innermost one comes last
    homes: dict[nn.Parameter, nn.Module] = {}
    for name, module in model.named_modules():
        for word, value in module.named_parameters(prefix=name, recurse=False):
            home = owner.get(module, model)
            if homes.setdefault(value, home) is not home:
                raise ConfigError(
                    f"{word} is a weight of two units of parallel=fsdp",
                    fix="give parallelize a wrap= of classes that share none, or set parallel=ddp",
                )
            if not value.dim():
                raise ConfigError(
                    f"{word} is a single number, which parallel=fsdp cannot cut",
                    fix="make it a vector of one, or set parallel=ddp",
                )


class _Memory:
    """Where FSDP's messages lie."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeScatter(_Memory):
    """One unit's reduce-scatter: the slice of the sum of all lanes, added along the tree as they come, turn by turn."""

    def __init__(self, turns: Turns, wire: torch.device) -> None:
        self._turns, self._wire = turns, wire
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
        assert turn != self._served  # a unit that is used twice in a forward has one gradient all the same
        self._served = turn
        for lane, row in zip(self._turns.lanes_in(turn), self._rows(input_tensor), strict=True):
            if lane is not None:
                self._held[lane] = row
        for to, source in self._turns.additions[turn]:
            self._held[to].add_(self._held.pop(source))
        if turn == self._turns.last:
            output_tensor.copy_(self._held.pop(0))

    def _rows(self, gradient: Tensor) -> list[Tensor]:
        """Return my slice of the gradient of each rank's lane."""
        size = len(self._turns.shares)
        sent = gradient.to(self._wire)
        received = torch.empty_like(sent)
        pieces = [sent.numel() // size] * size
        exchange(received, sent, pieces, pieces).wait()
        return list(received.to(gradient.device).view(size, -1))


class HostGather(_Memory):
    """An all-gather through the memory of the host, for a backend that moves no other."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Collect the slices of all ranks."""
        gathered = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        gather(gathered, input_tensor.cpu()).wait()
        output_tensor.copy_(gathered)


class Turns:
    """Who runs which lane when. Every rank runs as many, as all must take part in every gathering of weights.

    A rank with fewer lanes than others is idle in the first turn: it runs a lane whose gradient nobody adds.
    """

    def __init__(self, lanes: int, world: World) -> None:
        self.shares = [share(lanes, rank, world.size) for rank in range(world.size)]
        most = len(self.shares[0])
        self.idle = most - len(self.shares[world.rank])
        self.last = most - 1
        self.now = 0
        self.additions = additions_by_turn([most - mine.stop + lane for mine in self.shares for lane in mine])

    def lanes_in(self, turn: int) -> list[int | None]:
        """Return the lane of each rank in this turn; None: it is idle."""
        lanes = [mine.stop - 1 - self.last + turn for mine in self.shares]
        return [lane if lane in mine else None for lane, mine in zip(lanes, self.shares, strict=True)]


class ShardedTree:
    """The lane sum of a sharded model, along the tree."""

    scale = 1.0
    knows_all = True

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World) -> None:
        self._parameters, self._turns = parameters, Turns(lanes, world)
        self._stack, self._notes = TreeStack([], lanes, world.rank, world.size), list[Note]()
        self._shape, self._wire = TreeShape.of(lanes, world), wire_device(world)
        self._scatters = prepare_messages(model, self._turns, self._wire, torch.device(world.device), tree=True)
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
            self._stack.take_notes(self._notes)
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
        self._exchange = GatherExchange(self._nothing, len(notes[0]), self._shape, self._wire)
        self._exchange.start([self._nothing] * len(notes), notes)


class ShardedFree(FreeSum):
    """The lane sum of a sharded model, in the backend's own order: FSDP adds slice to slice, lane by lane."""

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter], lanes: int, world: World) -> None:
        super().__init__(parameters, world)
        self.scale = 1.0
        turns, wire, device = Turns(lanes, world), wire_device(world), torch.device(world.device)
        prepare_messages(model, turns, wire, device, tree=False)
        self.idle = turns.idle


def prepare_messages(
    model: nn.Module, turns: Turns, wire: torch.device, device: torch.device, *, tree: bool
) -> list[TreeScatter]:
    """Let FSDP send sums, not means; along the tree where that is asked for, and through the host where it must."""
    found = []
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if wire.type != device.type:
            unit.set_custom_all_gather(HostGather())  # type: ignore[arg-type]
        if tree:
            found.append(TreeScatter(turns, wire))
            unit.set_custom_reduce_scatter(found[-1])  # type: ignore[arg-type]
    return found
