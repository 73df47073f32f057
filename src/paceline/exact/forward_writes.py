"""Parameters that forward changes, such as a momentum encoder: refused by name, because each lane would change them again.

Tensors that forward leaves in attributes and reads in the next call, such as a hidden state, are named.

A parameter is compared by the sum of its bits, which sees what `.data` hides from torch's count of writes. It is read
twice in the first updates, in which one lane per rank is examined, and then rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline import terminal
from paceline.errors import ConfigError

_FIRST = 4
"""Updates that are examined at the start: a momentum encoder is a copy in the first one, and changes from the second on."""
_EVERY = 256
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LaneResult = tuple[Tensor, Tensor, Mapping[str, Any]]
"""Output of a lane, its gradient, and the values of its loss by name."""
_Sums = dict[tuple[int, str], int]
"""The sum of the bits of each parameter, by the number of its model and its name."""
_Buffer = tuple[dict[str, Tensor | None], str, Tensor, Tensor]
"""The table of a module in which a buffer lies, its name, the tensor, and a copy of its values."""


class ForwardWrites:
    """Examines whether forward changes the parameters of some models."""

    def __init__(self, models: Sequence[nn.Module], *, is_active: bool) -> None:
        self._models, self._is_active = models, is_active
        self._updates = 0
        self._is_due = self._has_written = self._has_mentioned = False

    def begin(self) -> None:
        """Begin an update."""
        self._updates += 1
        rarely = self._updates <= _FIRST or self._updates % _EVERY == 0
        self._is_due, self._has_written = self._is_active and rarely, False

    def examined(self, forward: Callable[[], LaneResult]) -> LaneResult:
        """Return what forward returns: the output of a lane first. Raise if it has changed a parameter.

        If so, forward is repeated. One that then changes nothing and returns the same, such as a clamp of a temperature
        before it is used, does so in every lane, and is right, unless it changes other values for the rows of the next
        lane, as `embedding(..., max_norm=)` does.
        """
        if not self._is_due:
            return forward()
        self._is_due = False
        buffers = [
            (module._buffers, key, value, value.clone())  # noqa: SLF001 - torch has no public table of them
            for model in self._models
            for module in model.modules()
            for key, value in module._buffers.items()  # noqa: SLF001
            if value is not None
        ]
        attributes = [
            (module, dict(vars(module))) for model in self._models for module in model.modules()
        ]
        before, kept = self._sums(), self._kept_tensors()
        result = forward()
        after = self._sums()
        if name := _differing(before, after):
            _restore(buffers)
            first, result = result[0], forward()
            is_repeated = self._has_written or _differing(after, self._sums())
            self._is_due = self._has_written = True  # the next lane is examined, too
            if is_repeated or not torch.allclose(first, result[0], rtol=1e-4):
                raise ConfigError(
                    f"forward changed the parameter {name}: each lane changes it again, so it depends on batch.lanes and on "
                    "the number of ranks",
                    fix="change it in the loop instead, before or after run.update, under torch.no_grad(): for a momentum "
                    "encoder, key.lerp_(query, 1 - momentum) for all parameters; or set batch.lanes=1 to train on one rank",
                )
        elif names := [
            name for name, held in self._kept_tensors().items() if kept.get(name) != held
        ]:
            # Does forward read what it has left there? Then it returns something else for the same rows.
            _restore(buffers)
            first, result = result[0], forward()
            if not torch.allclose(first, result[0], rtol=1e-4):
                self._mention_carried(names)
                _restore(buffers)
                for module, values in attributes:
                    vars(module).update(values)
                result = forward()
        return result

    def _mention_carried(self, names: list[str]) -> None:
        if self._has_mentioned:
            return
        self._has_mentioned = True
        terminal.error(
            f"warning: forward reads what an earlier call left in {', '.join(names[:4])} of the model. Each rank calls it for its "
            "own lanes, so the result depends on the number of ranks, and no checkpoint holds it\n"
            "  fix: let forward begin anew for each batch, or pass such state with the samples"
        )

    def _kept_tensors(self) -> dict[str, list[int]]:
        """Return which tensors lie in plain attributes of modules, alone or in a list, by name; also where None lies."""
        found = {}
        for model in self._models:
            for path, module in model.named_modules():
                for key, value in vars(module).items():
                    held = value if isinstance(value, list | tuple) else [value]
                    if value is None or any(isinstance(each, Tensor) for each in held):
                        found[f"{path}.{key}" if path else key] = [id(each) for each in held]
        return found

    def _sums(self) -> _Sums:
        """Return the sum of the bits of every parameter; the host waits for the device once."""
        named = [
            ((number, name), value.detach())  # the models of a GAN may have the same names
            for number, model in enumerate(self._models)
            for name, value in model.named_parameters()
            if not isinstance(value, nn.UninitializedParameter) and value.numel()
        ]
        sums = [_bits(value).sum(dtype=torch.int64) for _, value in named]
        numbers = torch.stack(sums).tolist() if sums else []
        return {key: number for (key, _), number in zip(named, numbers, strict=True)}


def _restore(buffers: list[_Buffer]) -> None:
    """Undo what forward has written to buffers; a cache that has grown stays, as its module believes."""
    with torch.no_grad():
        for table, key, value, before in buffers:
            now = table[key]
            if now is None or now.shape == before.shape:
                value.copy_(before)
                table[key] = value


def _bits(value: Tensor) -> Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dtype == torch.bool:
        return value
    return value.view(_BITS[value.element_size()])


def _differing(before: _Sums, after: _Sums) -> str:
    """Return the first parameter of which the sum differs; "" if there is none.

    >>> _differing({(0, "a"): 1, (1, "a"): 2}, {(0, "a"): 1, (1, "a"): 3, (1, "b"): 4})
    'a'
    """
    changed = (key for key, number in after.items() if before.get(key, number) != number)
    return next((name for _, name in changed), "")
