"""Numbers and modes of modules, and requires_grad of parameters: a loop may change them, and no state_dict holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.exact.parallel import resharded

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
_REQUIRES_GRAD = "requires_grad"
_SHOWN = 4


def module_values(model: nn.Module) -> dict[str, Any]:
    """Return the numbers of all modules and requires_grad of all parameters, by name.

    >>> module_values(nn.Dropout(0.5))
    {'training': True, 'p': 0.5, 'inplace': False}
    """
    found: dict[str, Any] = {}
    module = resharded(model)
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, bool | int | float) and key not in _TORCHS_OWN:
                found[f"{path}.{key}" if path else key] = value
    for path, parameter in module.named_parameters():
        found[f"{path}.{_REQUIRES_GRAD}"] = parameter.requires_grad
    return found


class ModuleValues:
    """Saves and restores what a loop changed since the script built its models."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = module_values(model)
        self._before: dict[str, Any] = {}
        """What the run's first start has built, if a checkpoint was restored."""

    def state(self) -> dict[str, Any]:
        """Return what the script has built, and what is different now."""
        changed = _changed(self._built, module_values(self._model))
        module = resharded(self._model)
        for name in list(changed):
            path, _, key = name.rpartition(".")
            if key not in {_REQUIRES_GRAD, "training"} and _has_cache(module.get_submodule(path)):
                del changed[name]  # the length of a cache, which no checkpoint holds
        return {"built": self._before or self._built, "changed": changed}

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Restore what the loop had changed; return the sentence about what the script builds otherwise now."""
        if not saved:
            return ""
        self._before, changed = dict(saved["built"]), saved["changed"]
        module = resharded(self._model)
        for name in changed.keys() & self._built.keys():
            path, _, key = name.rpartition(".")
            if key == _REQUIRES_GRAD and path:
                module.get_parameter(path).requires_grad_(changed[name])
            else:
                setattr(module.get_submodule(path), key, changed[name])
        texts = []
        for name, value in _changed(self._before, self._built).items():
            used = ", which is not used, because the loop had changed it" if name in changed else ""
            texts.append(f"{name} {value} (was {self._before[name]}{used})")
        if not texts:
            return ""
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        return f"the script builds its model with other numbers than when this run began: {'; '.join(texts[:_SHOWN])}{more}"

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks, by kind; numbers of the script's own modules may be a rank's own."""
        grouped: dict[str, list[Any]] = {
            "requires_grad of the parameters": [],
            "the modes (train or eval) of the modules": [],
            "the numbers of torch's modules, such as p of Dropout": [],
        }
        trained, modes, numbers = grouped.values()
        module = resharded(self._model)
        for path, parameter in module.named_parameters():
            trained.append((path, parameter.requires_grad))
        for path, each in module.named_modules():
            modes.append((path, each.training))
            if type(each).__module__.startswith("torch.nn.modules"):
                numbers += [
                    (path, key, value)
                    for key, value in vars(each).items()
                    if isinstance(value, int | float) and key not in _TORCHS_OWN
                ]
        return dict(grouped)


def _has_cache(module: nn.Module) -> bool:
    """Return whether a module holds tensors that are neither parameters nor in its state_dict."""
    return bool(module._non_persistent_buffers_set) or any(  # noqa: SLF001 - torch has no public name for it
        isinstance(value, Tensor) for value in vars(module).values()
    )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what both have with another value. Texts are compared, because nan is not equal to itself.

    >>> _changed({"p": 0.1, "n": float("nan")}, {"p": 0.2, "n": float("nan"), "new": 1})
    {'p': 0.2}
    """
    return {
        name: value
        for name, value in now.items()
        if name in before and repr(before[name]) != repr(value)
    }


class ForwardChanges:
    """Finds numbers of modules that forward changes: each rank runs other lanes, so they depend on the number of ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values, self._caches = module_values(model), self._cached()

    def names(self) -> list[str]:
        """Return the numbers that have changed since; not those of a module that filled a cache at the same time."""
        caches = self._cached()
        names = _changed(self._values, module_values(self._model))
        return [
            name
            for name in names
            if caches.get(path := name.rpartition(".")[0]) == self._caches.get(path)
        ]

    def _cached(self) -> dict[str, list[int]]:
        """Return where the tensors lie that are neither parameters nor in the state_dict, by module."""
        found = {}
        for path, module in resharded(self._model).named_modules():
            values = [*vars(module).values(), *module._buffers.values()]  # noqa: SLF001 - torch's own table
            found[path] = [id(value) for value in values if isinstance(value, Tensor)]
        return found
