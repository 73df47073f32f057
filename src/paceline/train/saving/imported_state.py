"""How a checkpoint of another program fits a model: wider types, tied weights, the kinds of optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.train.model.parallel import settled

IMPORT_AGAIN = (
    "rename the layers of the model, or import again into another run with --strip-prefix"
)
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_KINDS = {"Adam": _ADAM, "AdamW": _ADAM, "RAdam": _ADAM, "SGD": {"momentum_buffer"}}
_OPTIONAL = {"max_exp_avg_sq"}


def is_imported(manifest: Manifest) -> bool:
    """Return whether `paceline ckpt import` made this checkpoint, which then lacks the facts of a run."""
    return "imported" in manifest.values


def fitted(tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the model's types, where these are wider, and tied weights under all their names."""
    module = settled(model)
    weights = module.state_dict()
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(f"model.{name}")
    tied = {name: group for group in names.values() if len(group) > 1 for name in group}
    aliases: dict[str, Tensor] = {}
    for name, value in tensors:
        own = weights.get(_weight_of(name))
        ready = value if own is None else _widened(value, own.dtype)
        aliases |= dict.fromkeys(tied.get(name, ()), ready)
        tied.pop(name, None)
        yield name, ready
    for name in tied.keys() & aliases.keys():
        yield name, aliases[name]


def _weight_of(name: str) -> str:
    """Return the weight that a tensor belongs to; torch counts steps in fp32, whatever the weight is.

    >>> _weight_of("model.head.bias"), _weight_of("optimizer.exp_avg.head.bias"), _weight_of("optimizer.step.head.bias")
    ('head.bias', 'head.bias', '')
    """
    part, _, rest = name.partition(".")
    if part == "model":
        return rest
    kind, _, weight = rest.partition(".")
    return "" if kind == "step" else weight


def _widened(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert if no bit is lost."""
    is_float = value.is_floating_point() and dtype.is_floating_point
    is_wider = is_float and torch.promote_types(value.dtype, dtype) == dtype
    return value.to(dtype) if is_wider else value


def missing_kinds(manifest: Manifest, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line if the imported state belongs to another class of optimizer."""
    saved = set(manifest.values["imported"]["optimizer_state"])
    name = type(optimizer).__name__
    if not saved or saved - _OPTIONAL == _KINDS.get(name, saved - _OPTIONAL):
        return []
    kinds, wanted = ", ".join(sorted(saved)), ", ".join(sorted(_KINDS[name]))
    return [f"the optimizer state is {kinds}; {name} needs {wanted}"]
