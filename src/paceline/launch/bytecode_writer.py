"""Main program of the process that writes the file of bytecode: `python -m paceline.launch.bytecode_writer FILE`.

It is a process of its own so that a training does not wait while 2,500 modules are read, and compiled where Python has
not kept their bytecode. Standard input names them, as JSON. None of them is run.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import stat
import sys
import time
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path

from paceline.launch.bytecode import LEAST_NEW, Imported
from paceline.launch.bytecode_file import Bytecode, BytecodeFile, header, write_bytecode
from paceline.rundir import make_private
from paceline.world.parent_death import die_with_parent
from paceline.world.user_cache import why_untrusted

_UNUSED_S = 30 * 24 * 3600.0  # then a file is removed, such as that of packages before an upgrade
_LOW_PRIORITY = 10  # at 19 it would get 1 % of a busy core, and not end before a short training


def main() -> None:
    """Write the bytecode of the modules on standard input, with that in the file so far."""
    die_with_parent()
    os.nice(_LOW_PRIORITY)
    keep(Path(sys.argv[1]), [Imported(*facts) for facts in json.load(sys.stdin)])


def keep(path: Path, modules: Iterable[Imported]) -> None:
    """Write the file again if many of these modules are not in it; remove files that nobody uses."""
    folder = make_private(path.parent)
    if why_untrusted(folder):
        return
    known = BytecodeFile(path).current()
    new = {module.name: module for module in modules if not _has(known, module)}
    if len(new) < LEAST_NEW:
        return
    for file in folder.iterdir():
        facts = file.lstat()
        if stat.S_ISREG(facts.st_mode) and time.time() - facts.st_mtime > _UNUSED_S:
            file.unlink()
    found = {name: code for name, module in new.items() if (code := bytecode_of(module))}
    write_bytecode(path, known | found)


def _has(known: dict[str, Bytecode], module: Imported) -> bool:
    code = known.get(module.name)
    return code is not None and code[:2] == (module.source, module.is_package)


def bytecode_of(module: Imported) -> Bytecode | None:
    """Return what Python has kept for a module, or else compile it; None if that cannot be."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        found = Path(module.source).stat()
        kept = Bytecode(module.source, module.is_package, found.st_mtime_ns, _read(module.cached))
        if kept.is_current(found):
            return kept
        loader = SourceFileLoader(module.name, module.source)
        code = loader.source_to_code(Path(module.source).read_bytes(), module.source)
        compiled = kept._replace(content=header(found) + marshal.dumps(code))
        return compiled if compiled.is_current(Path(module.source).stat()) else None
    return None


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes() if path else b""
    return b""


if __name__ == "__main__":
    main()
