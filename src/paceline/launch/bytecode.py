"""Modules of installed packages, imported from one file of bytecode, which an earlier start had written.

A start with torch.compile imports 2,500 modules; Python looks up, checks and opens files for each. Where a call to the
file system takes 0.1 ms, those calls take longer than everything else. Here two calls per module are left: one compares
time and size of its source, one reads its bytecode. And where Python finds no bytecode and may write none, as in many
container images, it would compile all of them in every start. A script's own modules are not kept, nor what is at the
top level: what a name means there is decided by `sys.path`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from paceline import handover
from paceline.launch.bytecode_file import Bytecode, BytecodeFile
from paceline.world.user_cache import user_cache, why_untrusted
from paceline.world.world import World

LEAST_NEW = 50
"""Fewer new modules are not worth writing the file again."""
_DELAY_S = 30.0  # until the first steps have imported what they need


class Imported(NamedTuple):
    """A module that Python has imported from its source."""

    name: str
    source: str
    cached: str
    """Where Python keeps its bytecode, if it does."""
    is_package: bool


class BytecodeFinder:
    """Finds modules in a file of bytecode; others, and those that Python may find elsewhere, are left to it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, BytecodeFile()
        self._hooks = list(sys.path_hooks)
        self._names: dict[str, set[str]] = {}
        with contextlib.suppress(OSError):  # there is none yet, or it cannot be read
            if not why_untrusted(path.parent):
                self._file = BytecodeFile(path)
                os.utime(path)  # it is used

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a submodule of the package in the folders `path`."""
        del target
        folders = list(path or ())
        code = self._file.get(name) if len(folders) == 1 and sys.path_hooks == self._hooks else None
        if code is None or code.source != source_of(name, folders[0], is_package=code.is_package):
            return None
        try:
            found = os.stat(code.source)  # noqa: PTH116 - called thousands of times
            if not code.is_current(found) or self._has_rival(code):
                return None
        except OSError:
            return None
        return importlib.util.spec_from_file_location(
            name,
            code.source,
            loader=_Loader(name, code, found),
            submodule_search_locations=[_folder(code.source)] if code.is_package else None,
        )

    def _has_rival(self, code: Bytecode) -> bool:
        """Return whether there is a package or an extension of the same name, which Python prefers."""
        folder = _folder(code.source)
        if folder not in self._names:
            self._names[folder] = set(os.listdir(folder))  # noqa: PTH208 - called for every package
        stem = code.source[len(folder) + 1 : -len(".py")]
        return any(stem + suffix in self._names[folder] for suffix in ["", *EXTENSION_SUFFIXES])

    def keep(self) -> None:
        """Let a process of low priority write what the file does not have; wait for it."""
        modules = list(_imported_by_python())
        if len(modules) >= LEAST_NEW:
            optimize = ["-O"] * sys.flags.optimize
            writer = [sys.executable, "-P", *optimize, "-m", "paceline.launch.bytecode_writer"]
            subprocess.run(
                [*writer, str(self._path)],
                input=json.dumps(modules), text=True, capture_output=True, check=False,
            )  # fmt: skip


class _Loader(SourceFileLoader):
    """Loads a module from its bytecode in the file, once; after that it is a loader like any other."""

    def __init__(self, name: str, code: Bytecode, found: os.stat_result) -> None:
        super().__init__(name, code.source)
        self._content = code.content
        self._stats = {"mtime": found.st_mtime, "size": found.st_size}
        self._cached = importlib.util.cache_from_source(code.source)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return time and size of the source, which the finder has just read."""
        return self._stats if self._content and path == self.path else super().path_stats(path)

    def get_data(self, path: str) -> bytes:
        """Return the content of a file."""
        if not self._content or path != self._cached:
            return super().get_data(path)
        content, self._content = self._content, b""  # 50 MB, if all modules held theirs
        return content

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; tell `inspect` where it is."""
        # Otherwise torch's first operator in Python resolves the paths of all modules to find its own.
        getattr(inspect, "modulesbyfile", {})[self.path] = self.name
        super().exec_module(module)


def use_bytecode(env: Mapping[str, str]) -> None:
    """Import from the file of this environment from now on."""
    if env.get(handover.BYTECODE) == "0":
        return
    with contextlib.suppress(Exception):  # without it a program starts as well
        path = user_cache(env) / "bytecode" / _file_name()
        place = sys.meta_path.index(PathFinder)
        sys.meta_path.insert(place, BytecodeFinder(path))


def keep_bytecode(world: World) -> None:
    """Let rank 0 keep what the program has imported, once it has trained for a while."""
    finder = next((one for one in sys.meta_path if isinstance(one, BytecodeFinder)), None)
    if finder and world.is_main:
        threading.Thread(target=_keep_later, args=[finder], name="bytecode", daemon=True).start()


def _keep_later(finder: BytecodeFinder) -> None:
    time.sleep(_DELAY_S)
    with contextlib.suppress(Exception):  # the next start is like this one
        finder.keep()


def _imported_by_python() -> Iterator[Imported]:
    """Return the submodules of installed packages that were not imported from the file."""
    own, python = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
    folders = {own, python, *(_folder(path) for path in _installed_packages())}
    installed = tuple(f"{folder}/" for folder in folders)
    for name, module in list(sys.modules.items()):
        with contextlib.suppress(AttributeError):  # no module
            facts = object.__getattribute__(module, "__dict__")  # loads no lazy module
            spec = facts.get("__spec__")
            if type(spec.loader) is not SourceFileLoader or not spec.origin.startswith(installed):
                continue
            is_package = spec.submodule_search_locations is not None
            if "." in name and spec.origin.endswith(source_of(name, "", is_package=is_package)):
                yield Imported(name, spec.origin, spec.cached or "", is_package)


def source_of(name: str, folder: str, *, is_package: bool) -> str:
    """Return the file of a submodule of the package in a folder.

    >>> source_of("torch.nn.functional", "/lib/torch/nn", is_package=False)
    '/lib/torch/nn/functional.py'
    """
    last = name.rpartition(".")[2]
    return f"{folder}/{last}/__init__.py" if is_package else f"{folder}/{last}.py"


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _installed_packages() -> list[str]:
    """Return the folders on `sys.path` that describe installed packages."""
    found: list[str] = []
    for folder in sys.path:
        with contextlib.suppress(OSError):  # not there, or not readable
            names = os.listdir(folder) if folder else []  # noqa: PTH208 - as names, not as paths
            found += [f"{folder}/{name}" for name in names if name.endswith(".dist-info")]
    return found


def _file_name() -> str:
    """Return the name of the file for this interpreter and its packages: two containers may have others at one path."""
    packages = sorted({path.rpartition("/")[2] for path in _installed_packages()})
    facts = [sys.prefix, sys.version, str(sys.flags.optimize), *packages]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return f"{sys.implementation.cache_tag}-{digest}"
