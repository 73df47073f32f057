"""Whether a script could know which rank it is: without that, every rank has done the same work."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from paceline import handover

_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    handover.MEETING,
)

_LIBRARY = {"os", "collections.abc"}
_HARMLESS = ("tqdm.",)
"""Modules that go through all variables for those with their own prefix; torch imports tqdm."""


class _WatchedVariables(dict[Any, Any]):
    """The data of `os.environ`, which notes whether a variable of interest was read."""

    def __init__(
        self, variables: dict[Any, Any], names: Iterable[Any], first_read: Callable[[], None]
    ) -> None:
        super().__init__(variables)
        self._names = frozenset(names)
        self._first_read = first_read
        self.was_read = False

    def __getitem__(self, name: Any) -> Any:
        if (
            not self.was_read
            and name in self._names
            and not _reading_module().startswith(_HARMLESS)
        ):
            self.was_read = True
            self._first_read()
        return super().__getitem__(name)


def _reading_module() -> str:
    """Return the module that reads a variable now."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - inspect would import much more
    while frame is not None and frame.f_globals.get("__name__") in _LIBRARY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")) if frame is not None else ""


class RankAwareness:
    """Watches `os.environ`: every way to join, of any library, reads the rank or the world size there."""

    def __init__(self, first_read: Callable[[], None] = lambda: None) -> None:
        variables = os.environ
        self._variables = _WatchedVariables(
            variables._data,  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            map(variables.encodekey, _NAMES),
            first_read,
        )
        variables._data = self._variables  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def is_possible(self) -> bool:
        """Whether this process read its rank, or had children, which inherit the variables."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self._variables.was_read or children.ru_maxrss > 0
