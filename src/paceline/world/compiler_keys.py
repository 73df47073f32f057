"""The hashes of torch and Triton that name all compiled code: known before the first compiled step asks for them.

torch reads its 2,300 source files for one, in every start. Whether a file has changed is told by its time and size, as
for bytecode. Triton reads its library of 400 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from paceline.rundir import write_whole
from paceline.safe_open import SMALL_BYTES, read_bytes

_FILE = "torch-key.json"
_HASHED = (".py", ".so", ".cpp", ".ld")


def begin_triton_key() -> None:
    """Compute Triton's hash in a thread; both keep the result."""
    from torch._inductor.codecache import triton_key

    threading.Thread(target=triton_key, name="triton key", daemon=True).start()


def reuse_torch_key(folder: Path) -> None:
    """Give torch the hash that an earlier start has kept in this folder; compute and keep it if torch has changed."""
    import torch
    from torch._inductor.codecache import torch_key

    if not hasattr(torch_key, "set"):  # another version of torch
        return
    state = state_of_sources(Path(torch.__file__).parent)
    kept = _read(folder / _FILE)
    if kept.get("sources") == state:
        with contextlib.suppress(AssertionError, RuntimeError):  # this process knows it already
            torch_key.set(bytes.fromhex(kept["key"]))
        return
    text = json.dumps({"sources": state, "key": torch_key().hex()})
    with contextlib.suppress(OSError):  # a full disk, for example: the next start computes it again
        write_whole(folder / _FILE, text.encode(), durable=False)


def state_of_sources(root: Path) -> str:
    """Return a digest of the paths, times and sizes of all files below a folder that torch may hash."""
    digest = hashlib.sha256()
    for path, facts in sorted(_files_below(str(root))):
        digest.update(f"{path} {facts.st_mtime_ns} {facts.st_size}\n".encode())
    return digest.hexdigest()


def _files_below(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif entry.name.endswith(_HASHED):
                yield entry.path, entry.stat()


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_bytes(path, SMALL_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
