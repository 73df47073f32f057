"""The numbers that a function of the script reads, such as the weight of a loss term: a CUDA graph would repeat them."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, type(None))
_LIBRARIES = {"torch", "numpy", "paceline"}
"""Their own variables do not change; but they hold functions of the script, as a Trainer does."""
_MAX_DEPTH = 8
_MAX_ITEMS = 32


class _Names(NamedTuple):
    """The names that the code of a function uses."""

    variables: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    """Variables and attributes that it writes."""


class _Read(NamedTuple):
    """A variable that a function reads."""

    name: str
    get: Callable[[], Any]
    is_stored: bool


class ScriptValues:
    """Reads the numbers and texts that a function uses: variables around it, globals, attributes of objects.

    Functions that it calls are followed, as far as they are reached by these names.
    """

    def __init__(self, function: Any) -> None:
        self._reads: list[_Read] = []
        self._seen: set[tuple[int, _Names]] = set()
        self._follow(function, _Names(), _MAX_DEPTH)

    def now(self) -> tuple[tuple[str, Any], ...]:
        """Return names and values; of a tensor on a GPU, which a graph reads, only where it lies."""
        return tuple((read.name, _fixed(read.get(), read.is_stored)) for read in self._reads)

    def _follow(self, value: Any, names: _Names, depth: int) -> None:
        """Find what is read of a value by code that uses these names."""
        seen = id(value), names
        if depth == 0 or isinstance(value, (*_PLAIN, Tensor, type)) or seen in self._seen:
            return
        self._seen.add(seen)
        if isinstance(value, FunctionType):
            self._follow_function(value, depth - 1)
        elif isinstance(value, MethodType):
            self._follow(value.__func__, names, depth)
            self._follow(value.__self__, _names_in(value.__func__.__code__), depth)
        elif isinstance(value, functools.partial):
            self._follow_all((value.func, *value.args, *value.keywords.values()), names, depth)
        elif isinstance(value, dict | list | tuple):
            items = value.values() if isinstance(value, dict) else value
            self._follow_all(items, names, depth)
        elif isinstance(value, nn.Module):
            self._follow_module(value)
        else:
            self._follow_object(value, names, depth)

    def _follow_all(self, values: Iterable[Any], names: _Names, depth: int) -> None:
        for value in list(values)[:_MAX_ITEMS]:
            self._follow(value, names, depth - 1)

    def _follow_function(self, function: FunctionType, depth: int) -> None:
        names = _names_in(function.__code__)
        is_library = _is_library(function.__module__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._read(name, functools.partial(_content, cell), names, depth, keep=not is_library)
        if is_library:
            return
        variables = function.__globals__
        for name in sorted(names.variables & variables.keys()):
            self._read(name, functools.partial(variables.get, name), names, depth)

    def _follow_module(self, module: nn.Module) -> None:
        """Read the numbers of a loss such as `nn.CrossEntropyLoss`; those of models are read elsewhere."""
        if next(module.parameters(), None) is None:
            for name, value in vars(module).items():
                if type(value) is float:
                    read = _Read(name, functools.partial(vars(module).get, name), is_stored=False)
                    self._reads.append(read)

    def _follow_object(self, value: Any, names: _Names, depth: int) -> None:
        attributes = getattr(value, "__dict__", {})
        keep = not _is_library(type(value).__module__)
        for name in sorted(names.attributes & attributes.keys()):
            self._read(name, functools.partial(attributes.get, name), names, depth, keep=keep)
        for name in sorted({*names.attributes, "__call__"} & vars(type(value)).keys()):
            if isinstance(vars(type(value))[name], FunctionType):
                self._follow(getattr(value, name), names, depth - 1)

    def _read(
        self,
        name: str,
        get: Callable[[], Any],
        names: _Names,
        depth: int,
        *,
        keep: bool = True,
    ) -> None:
        """Read a variable from now on if it may be a number, and follow what it holds."""
        value = get()
        if keep and isinstance(value, (*_PLAIN, Tensor)):
            self._reads.append(_Read(name, get, name in names.stored))
        else:
            self._follow(value, names, depth)


def _content(cell: CellType) -> Any:
    """Return what a variable of an outer function holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _fixed(value: Any, is_stored: bool) -> Any:  # noqa: FBT001 - of one variable
    """Return what a value is to a graph. A tensor that the function itself stores is a result, not an input."""
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, Tensor) or is_stored:
        return type(value).__name__
    if value.is_cpu and value.numel() == 1:
        return value.item()  # it becomes a number in the graph
    return value.data_ptr() if value.is_cuda else (id(value), value._version)  # noqa: SLF001 - torch's count of writes


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _names_in(code: CodeType) -> _Names:
    """Return the names that code uses, with those of the functions defined in it."""
    every = [
        (op.opname, str(op.argval)) for each in _codes_in(code) for op in dis.get_instructions(each)
    ]

    def with_prefix(*prefixes: str) -> frozenset[str]:
        return frozenset(name for operation, name in every if operation.startswith(prefixes))

    stored = with_prefix("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
    return _Names(
        with_prefix("LOAD_GLOBAL", "LOAD_NAME"), with_prefix("LOAD_ATTR", "LOAD_METHOD"), stored
    )


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
