"""How a checkpoint of another program fits a run: wider types, tied weights, numbered parameters, schedulers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.exact.parallel import resharded
from paceline.exact.state import KERNELS
from paceline.train.saving.tracked import Tracked, decode

IMPORT_AGAIN = "rename the layers of the model, or import again into another run with --strip-prefix; for an optimizer: give it the parameters of the original in the same groups, or import again with --weights-only --step N"
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_KINDS = {"Adam": _ADAM, "AdamW": _ADAM, "RAdam": _ADAM, "SGD": {"momentum_buffer"}}
_OPTIONAL = {"max_exp_avg_sq"}


def is_imported(manifest: Manifest) -> bool:
    """Return whether `paceline ckpt import` made this checkpoint, which then lacks the facts of a run."""
    return "imported" in manifest.values


def imported_step(manifest: Manifest, steps_per_epoch: int) -> int:
    """Return the step after which a run resumes from a checkpoint; some programs count epochs only."""
    epochs = manifest.values["imported"].get("epochs", 0) if is_imported(manifest) else 0
    return int(epochs) * steps_per_epoch if epochs else manifest.step


class Unbound(Exception):
    """The reason why the numbered parameters of an imported optimizer are not those of the script."""


def names_of_places(
    manifest: Manifest, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, str]:
    """Return the parameter that each number in the imported optimizer state means: `#0.7` is parameter 7 of optimizer 0.

    torch saves the state in the order in which a script gave its parameters to the optimizer, so the optimizer of this script
    says what they are, as in `optimizer.load_state_dict`. Raises `Unbound` if its parameters have other shapes.
    """
    facts = manifest.values["imported"]
    saved = facts.get("places", [])
    if not any(saved):
        return {}
    if len(saved) != len(optimizers):
        raise Unbound(f"the file has {len(saved)} optimizers, the run has {len(optimizers)}")
    parameters = dict(resharded(model).named_parameters())
    order = list(parameters)
    before = [name for name in facts["order"] if name in parameters]
    # Two classes may have the same layers in another order: parameter 7 of the one is not that of the other.
    as_before = dict(zip(order, before, strict=True)) if len(before) == len(order) else {}
    found: dict[str, str] = {}
    for number, (groups, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
        own = _own_names(parameters, optimizer)
        same_sizes = [len(group) for group in groups] == [len(group) for group in own]
        names = [as_before.get(name, name) for group in own for name in group]
        shapes = [None if shape is None else tuple(shape) for group in groups for shape in group]
        if not same_sizes or not _fit(names, shapes, parameters):
            given = {name for group in own for name in group}
            ordered = [name for name in before or order if name in given]
            names = _by_shape(groups, ordered, parameters, own)
        found |= {f"#{number}.{place}": name for place, name in enumerate(names)}
    return found


def _own_names(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[list[str]]:
    """Return the names of the parameters of each group of an optimizer."""
    names: dict[Tensor, str] = {value: name for name, value in parameters.items()}
    return [
        [names[value] for value in group["params"] if value in names]
        for group in optimizer.param_groups
    ]


def _fit(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...] | None],
    parameters: Mapping[str, nn.Parameter],
) -> bool:
    return all(
        shape is None or tuple(parameters[name].shape) == shape
        for name, shape in zip(names, shapes, strict=True)
    )


def _by_shape(
    groups: Sequence[Sequence[Any]],
    ordered: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    own: Sequence[Sequence[str]],
) -> list[str]:
    """Match the parameters of other groups: of each shape in the order of the model, if one saved group has them all.

    The Trainer of transformers makes two groups, with and without weight decay, where many scripts make one.
    """
    wanted: dict[tuple[int, ...], list[str]] = {}
    for name in ordered:
        wanted.setdefault(tuple(parameters[name].shape), []).append(name)
    counts = [
        Counter(None if shape is None else tuple(shape) for shape in group) for group in groups
    ]
    before, now = [[len(group) for group in each] for each in (groups, own)]
    names = []
    for group, count in zip(groups, counts, strict=True):
        for each in group:
            shape = None if each is None else tuple(each)
            if (
                shape is None
                or len(wanted.get(shape, ())) == 0
                or count[shape] != sum(c[shape] for c in counts)
            ):
                raise Unbound(
                    f"the groups of the saved optimizer have {before} parameters, those of the script {now}, and their shapes do not show which is which"
                )
            names.append(wanted[shape].pop(0))
    if rest := [name for left in wanted.values() for name in left]:
        raise Unbound(
            f"the saved optimizer has {sum(before)} parameters, the script's {sum(now)}: {rest[0]} is new"
        )
    return names


def restore_schedulers(
    manifest: Manifest, optimizers: Sequence[torch.optim.Optimizer], tracked: Tracked
) -> list[str]:
    """Continue the tracked schedulers as the file says; return a line for everything that is not as in the file."""
    facts = manifest.values["imported"]
    saved = [decode(state, {}) for state in facts.get("schedulers", [])]
    groups = [[decode(group, {}) for group in each] for each in facts.get("groups", [])]
    schedulers = {
        name: item for name, item in tracked.objects.items() if item in tracked.schedulers
    }
    lines = []
    restored: list[str] = []
    if saved and not schedulers:
        lines.append(
            "the state of the scheduler in the file is left out: the run tracks none, run.track(scheduler=scheduler) restores it"
        )
    elif saved and len(saved) != len(schedulers):
        lines.append(
            f"the state of the {len(saved)} schedulers in the file is left out: the run tracks {len(schedulers)}"
        )
    else:
        sizes = [
            (len(each), len(own.param_groups))
            for each, own in zip(groups, optimizers, strict=False)
        ]
        for (name, item), state in zip(schedulers.items(), saved, strict=False):
            fitting = _fitting(state, item.state_dict(), sizes)
            if isinstance(fitting, str):
                lines.append(f"the state of the scheduler in the file is left out: {fitting}")
                continue
            item.load_state_dict(fitting)
            restored.append(name)
            lines.append(
                f"{name} ({type(item).__name__}) continues after {state['last_epoch']} of its steps"
            )
    missing = [name for name in tracked.objects if name not in restored]
    if missing and imported_step(manifest, 1):
        lines.append(
            f"not in the file, or left out: {', '.join(missing)}; a state begins as the script made it"
        )
    for own, each in zip(optimizers, groups, strict=False):
        lines += _restore_options(own, each, with_schedule=bool(restored))
    return lines


_BY_GROUP = {
    "base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums",
}  # fmt: skip
"""Lists in the state of schedulers with one element per group."""


def _fitting(
    state: dict[str, Any], now: Mapping[str, Any], sizes: Sequence[tuple[int, int]]
) -> dict[str, Any] | str:
    """Return the part of a saved state that this scheduler has, or why it belongs to another one.

    torch's versions differ in the names with an underscore; those without are the options of the class.
    """
    before, wanted = [{key for key in each if key[0] != "_"} - {"verbose"} for each in (state, now)]
    if before != wanted:
        return f"it has {', '.join(sorted(before - wanted)) or 'no ' + ', '.join(sorted(wanted - before))}, which belongs to another class of scheduler"
    counts = {saved for saved, _ in sizes} if sizes else set()
    fitting = {}
    for key, value in state.items():
        if key not in now:
            continue
        fitting[key] = value
        if key in _BY_GROUP and isinstance(value, list) and len(value) != len(now[key]):
            if len(value) not in counts or any(each != value[0] for each in value):
                return f"its {key} has {len(value)} values, the scheduler of the script {len(now[key])}"
            fitting[key] = value[:1] * len(now[key])
    return fitting


_SCHEDULED = (
    "lr",
    "initial_lr",
    "min_lr",
    "max_lr",
    "momentum",
    "betas",
    "base_momentum",
    "max_momentum",
    "swa_lr",
)
"""Options of a group that schedulers set, and from which most compute the next value."""


def _restore_options(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], *, with_schedule: bool
) -> list[str]:
    """Set what schedulers have set; return a line for each other option that differs."""
    groups = optimizer.param_groups
    if not saved:
        return []
    if len(saved) != len(groups):
        shared = [key for key in saved[0] if all(each.get(key) == saved[0][key] for each in saved)]
        if with_schedule and "lr" not in shared:
            return [
                f"the learning rates of the {len(saved)} groups in the file are left out: the script has {len(groups)} groups"
            ]
        saved = [{key: saved[0][key] for key in shared}] * len(groups)
    lines: dict[str, None] = {}
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            if key in KERNELS or key not in group or _same(group[key], value):
                continue
            if with_schedule and key in _SCHEDULED:
                if isinstance(group[key], Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
            elif key != "initial_lr":
                now = group[key].item() if isinstance(group[key], Tensor) else group[key]
                lines[f"{key} is {value} in the file, {now} in the script, which is used"] = None
    return list(lines)


def _same(now: Any, saved: Any) -> bool:
    """Return whether two options are the same number, or pairs of the same numbers."""
    if isinstance(now, list | tuple) and isinstance(saved, list | tuple):
        return len(now) == len(saved) and all(map(_same, now, saved))
    if isinstance(now, int | float | Tensor) and isinstance(saved, int | float):
        return math.isclose(float(now), saved, rel_tol=1e-12)
    return bool(now == saved)


def fitted(tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the model's types, where these are wider, and tied weights under all their names."""
    module = resharded(model)
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
