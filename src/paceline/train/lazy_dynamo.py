"""`torch._dynamo`, imported when something needs it: training without torch.compile never does.

Every stock optimizer imports it, for two calls that do nothing without torch.compile. That takes as long again as half of
`import torch`, and reads 900 files. So a stand-in answers these calls. Whatever else is asked of it imports torch's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where torch/_compile.py keeps what `disable` has returned
_Function = Callable[..., Any]


class LazyDynamo(ModuleType):
    """Stands in for `torch._dynamo` until something needs more than `graph_break` and `disable`."""

    def __init__(self, file: str | None) -> None:
        super().__init__(_NAME)
        self.__file__ = file
        self._disabled: list[_Function] = []

    def graph_break(self, msg: str = "") -> None:
        """End the graph that is being traced; nothing is being traced yet."""

    def disable(self, fn: _Function | None = None, *given: Any, **more: Any) -> Any:
        """Return a function that is not compiled: to torch itself the function as it is, until something is compiled."""
        caller = sys._getframe(1).f_globals["__name__"]  # noqa: SLF001 - Python has no public one
        if fn is None or caller != "torch._compile":
            return self._loaded().disable(fn, *given, **more)
        self._disabled.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` and others ask all modules
            raise AttributeError(name)
        return getattr(self._loaded(), name)

    def _loaded(self) -> ModuleType:
        """Import torch's own module in place of this one."""
        vars(torch).pop("_dynamo", None)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        loaded = importlib.import_module(_NAME)
        while self._disabled:
            vars(self._disabled.pop()).pop(_CACHE, None)
        return loaded


def import_dynamo_lazily() -> None:
    """Let `import torch._dynamo` import a stand-in, unless it is imported already."""
    if _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    stand_in = LazyDynamo(spec.origin if spec else None)
    sys.modules[_NAME] = stand_in
    torch._dynamo = stand_in  # noqa: SLF001 - as an import does
