"""Modules imported from one file of bytecode, which an earlier start has written.

A start with torch.compile imports 2,500 modules; Python looks up, checks and opens files for each. Where a call to the
file system takes 0.1 ms, those calls take longer than everything else. Here one call per module is left: whether the
source still has the time and size that Python itself compares. Only submodules are kept: what a name at the top level
means is decided by `sys.path`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.launch.bytecode_file import Bytecode, BytecodeFile, write_bytecode
from paceline.world.user_cache import user_cache, why_untrusted
from paceline.world.world import World

_LEAST_NEW = 50  # fewer new modules are not worth writing the file again
_DELAY_S = 30.0  # until the first steps have imported what they need
_UNUSED_S = (
    30 * 24 * 3600.0
)  # after which a file is removed, such as that of packages before an upgrade


class BytecodeFinder:
    """Finds submodules in a file of bytecode; others, and those that have changed, are left to the next finder."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, BytecodeFile()
        with contextlib.suppress(OSError):  # there is none yet, or it cannot be read
            if not why_untrusted(path.parent):
                self._file = BytecodeFile(path)
                os.utime(path)  # it is used

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a submodule of the package in the folders `path`."""
        del target
        code = None if path is None else self._file.get(name)
        if code is None or list(path or ()) != [_parent_folder(code)]:
            return None
        stats = code.stats_if_current()
        if stats is None:
            return None
        # Otherwise torch's first operator in Python resolves the paths of all modules to find its own.
        inspect.modulesbyfile[code.source] = name
        folders = [code.source.rpartition("/")[0]] if code.is_package else None
        return importlib.util.spec_from_file_location(
            name,
            code.source,
            loader=_Loader(name, code, stats),
            submodule_search_locations=folders,
        )

    def keep(self) -> None:
        """Write the file again if the program has imported many modules that it does not have."""
        from paceline.rundir import make_private

        new = {name: code for name, code in _imported_by_python() if self._file.get(name) != code}
        if len(new) < _LEAST_NEW:
            return
        folder = make_private(self._path.parent)
        if why_untrusted(folder):
            return
        for file in folder.iterdir():
            if time.time() - file.stat().st_mtime > _UNUSED_S:
                file.unlink()
        write_bytecode(self._path, self._file.current() | new)


class _Loader(SourceFileLoader):
    """Loads a module from its bytecode in the file."""

    def __init__(self, name: str, code: Bytecode, stats: Mapping[str, Any]) -> None:
        super().__init__(name, code.source)
        self._code, self._stats = code, stats
        self._cached = importlib.util.cache_from_source(code.source)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return time and size of the source, which the finder has just read."""
        return self._stats if path == self.path else super().path_stats(path)

    def get_data(self, path: str) -> bytes:
        """Return the content of a file."""
        return self._code.content if path == self._cached else super().get_data(path)


def use_bytecode(env: Mapping[str, str]) -> None:
    """Import from the file of this environment from now on."""
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # the user has no home folder; the program has no PathFinder
        path = user_cache(env) / "bytecode" / _file_name()
        place = sys.meta_path.index(PathFinder)
        sys.meta_path.insert(place, BytecodeFinder(path))


def keep_bytecode(world: World) -> None:
    """Let rank 0 keep what the program has imported, once it has trained for a while."""
    finder = next((one for one in sys.meta_path if isinstance(one, BytecodeFinder)), None)
    if finder and world.is_main and not sys.dont_write_bytecode:
        threading.Thread(target=_keep_later, args=[finder], name="bytecode", daemon=True).start()


def _keep_later(finder: BytecodeFinder) -> None:
    time.sleep(_DELAY_S)
    with contextlib.suppress(
        OSError
    ):  # a full disk, for example: the next start imports as this one
        finder.keep()


def _imported_by_python() -> Iterator[tuple[str, Bytecode]]:
    """Return the submodules that were not imported from the file, and their bytecode."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if not isinstance(spec, ModuleSpec) or type(spec.loader) is not SourceFileLoader:
            continue
        if "." in name and spec.name == name and spec.origin and spec.cached:
            with contextlib.suppress(OSError):  # it has no bytecode
                content = Path(spec.cached).read_bytes()
                is_package = spec.submodule_search_locations is not None
                code = Bytecode(spec.origin, is_package, content)
                if code.stats_if_current():
                    yield name, code


def _parent_folder(code: Bytecode) -> str:
    """Return the folder of the package that a module belongs to."""
    folder = code.source.rpartition("/")[0]
    return folder.rpartition("/")[0] if code.is_package else folder


def _file_name() -> str:
    """Return the name of the file for this interpreter and its packages: two containers may have others at one path."""
    packages = {path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")}
    facts = [sys.prefix, str(sys.flags.optimize), *sorted(packages)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return f"{sys.implementation.cache_tag}-{digest}"
