"""Whether a replayed change of the weights has the bits of an eager one: both are made, from the same start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.data.reading.nest import leaves_of
from paceline.train.gradients.lane_stack import LaneGradients
from paceline.train.step.captured_outcome import same

_COPIES = 2.5
"""Room that a comparison needs: two copies of what changes, and the work of the optimizer."""


class ChangedState:
    """All that a change of the weights may write: weights, buffers, the optimizer's state, gradients."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        gradients: LaneGradients,
    ) -> None:
        # Options, such as a rate that lies on the GPU, are read only: a write would look like one by the script.
        every = [*optimizer.state.values(), *(group["params"] for group in optimizer.param_groups)]
        for model in models:
            every += [*model.parameters(), *model.buffers()]
        tensors = [leaf for leaf in leaves_of(every) if isinstance(leaf, Tensor)]
        self._compared = list({id(value): value for value in tensors}.values())
        # Clipping changes gradients, too; a replay of the whole update has its own.
        self._others = [value for value in gradients if value is not None]

    @property
    def has_room(self) -> bool:
        """Whether the GPU can hold the copies."""
        size = sum(value.nbytes for value in (*self._compared, *self._others))
        free = torch.cuda.mem_get_info()[0]
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused > _COPIES * size

    def difference(
        self, eager: Callable[[], object], replays: Mapping[str, Callable[[], object]]
    ) -> str:
        """Make an eager change, and each replay from the same start; keep the eager result.

        Return which replay gave other bits; "" if none did.
        """
        every = [*self._compared, *self._others]
        with torch.no_grad():
            start = [value.clone() for value in every]
            eager()
            wanted = [value.clone() for value in every]
            text = ""
            for name, replay in replays.items():
                _write(every, start)
                replay()
                if not same(self._compared, wanted[: len(self._compared)]):
                    text = f"{name} has changed weights, buffers or the optimizer's state to other bits"
            _write(every, wanted)
        return text


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def can_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step can be undone and made again: its state is known, and no hook does more.

    >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    >>> can_repeat(sgd)
    True
    >>> hook = sgd.register_step_post_hook(lambda *_: None)
    >>> can_repeat(sgd)
    False
    """
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    has_hooks = any(getattr(optimizer, name, None) for name in hooks)
    return type(optimizer).__module__.startswith(("torch.", "paceline.")) and not has_hooks
