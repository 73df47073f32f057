"""The hashes of torch and Triton that name all compiled code: known before the first compiled step asks for them.

torch reads its 2,300 source files for one, in every start. Whether a file has changed is told by its time and size, as
for bytecode. Triton reads its library of 400 MB.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.rundir import write_whole
from paceline.safe_open import read_json

_FILE = "torch-key.json"
_HASHED = (".py", ".so", ".cpp", ".ld")


def begin_triton_key() -> None:
    """Compute Triton's hash in a thread; Triton keeps the result."""
    with contextlib.suppress(ImportError):  # another version of torch, or no Triton
        from torch._inductor.runtime.triton_compat import triton_key

        threading.Thread(target=triton_key, name="triton key", daemon=True).start()


def reuse_torch_key(folder: Path) -> None:
    """Give torch the hash that an earlier start has kept in this folder; compute and keep it if torch has changed."""
    import torch
    from torch._inductor.codecache import torch_key

    try:
        state = state_of_sources(Path(torch.__file__).parent)
    except OSError:  # torch itself says so
        return
    kept = _read(folder / _FILE)
    if kept and kept.sources == state:
        with contextlib.suppress(
            AttributeError, AssertionError, RuntimeError
        ):  # another version of torch; known already
            torch_key.set(kept.key)  # type: ignore[attr-defined]
        return
    text = json.dumps({"sources": state, "key": torch_key().hex()})
    with contextlib.suppress(OSError):  # a full disk, for example: the next start computes it again
        write_whole(folder / _FILE, text.encode(), durable=False)


def state_of_sources(root: Path) -> str:
    """Return a digest of the paths, times and sizes of all files below a folder that torch may hash.

    Raise OSError if it cannot be told, as with a link to a folder.
    """
    digest = hashlib.sha256()
    for path, facts in sorted(_files_below(str(root))):
        digest.update(f"{path} {facts.st_mtime_ns} {facts.st_size}\n".encode())
    return digest.hexdigest()


def _files_below(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__" or _holds_headers(entry):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif entry.is_dir():
                raise OSError(errno.ELOOP, "a link to a folder", entry.path)
            elif entry.name.endswith(_HASHED):
                yield entry.path, entry.stat()


def _holds_headers(entry: os.DirEntry[str]) -> bool:
    """Return whether this is torch/include, with 600 folders of headers, and no package."""
    return entry.name == "include" and not Path(entry.path, "__init__.py").exists()


class _Kept(NamedTuple):
    sources: str
    key: bytes


def _read(path: Path) -> _Kept | None:
    """Return what an earlier start has kept; None if there is nothing, or it is damaged."""
    try:
        found = read_json(path)
        return _Kept(found["sources"], bytes.fromhex(found["key"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
