"""What survives: the tensors of a run, in a folder that exists only when it is whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save as to_safetensors
from torch import Tensor

from paceline.rundir import make_durable, make_private, write_whole, writing_to

TENSORS = "state.safetensors"
MANIFEST = "manifest.json"


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], *, step: int, samples: int) -> int:
    """Write tensors and a manifest that covers them, then give the folder its name; return the bytes written."""
    partial = folder.with_name(f".{folder.name}.partial")
    with writing_to(folder):
        shutil.rmtree(partial, ignore_errors=True)
        make_private(partial)
        body = to_safetensors({name: value.cpu().contiguous() for name, value in tensors.items()})
        write_whole(partial / TENSORS, body)
        manifest = {
            "format": 1,
            "step": step,
            "samples": samples,
            "files": {TENSORS: {"size_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}},
        }
        write_whole(partial / MANIFEST, json.dumps(manifest, indent=2).encode())
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        make_durable(folder.parent)
    return len(body)
