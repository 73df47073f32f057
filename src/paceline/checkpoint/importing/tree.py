"""Read a torch.save file through a process of its own; only safetensors and JSON reach this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.importing.stored_tensor import StoredTensor, read_header, truncated
from paceline.errors import DataError
from paceline.rundir import make_private
from paceline.safe_open import read_json

_LARGEST_TREE = 1 << 28

TENSORS = "tensors.safetensors"
TREE = "tree.json"
_READER = "paceline.checkpoint.importing.torch_file"
_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class Other(NamedTuple):
    """A value that is neither a tensor, nor a number, text or container."""

    kind: str


def read_torch_file(source: Path, scratch: Path) -> Any:
    """Return what torch.save wrote, with a `StoredTensor` for each tensor; they are copied into `scratch`."""
    folder = make_private(scratch / source.name)
    environment = {name: value for name, value in os.environ.items() if name != _UNSAFE}
    done = subprocess.run(
        [sys.executable, "-P", "-m", _READER, str(source.absolute()), str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    if done.returncode:
        raise _reader_failed(source, done)
    report = read_json(folder / TREE, _LARGEST_TREE)
    if "refused" in report:
        raise _needs_code(source, report["refused"])
    if "unreadable" in report:
        raise truncated(source, report["unreadable"])
    return _decode(report["content"], read_header(folder / TENSORS))


def _reader_failed(source: Path, done: subprocess.CompletedProcess[str]) -> DataError:
    last = done.stderr.strip().rpartition("\n")[2] or "no output"
    return DataError(
        f"cannot read {source}: the process that reads it ended with code {done.returncode} ({last})",
        fix="free memory and disk space, and check that the file is complete",
    )


def _needs_code(source: Path, name: str) -> DataError:
    return DataError(
        f"{source} contains {name}, which only unrestricted unpickling can load; that may run any code",
        fix="if you trust the file, load it yourself with weights_only=False, and use torch.save for the tensors alone: "
        '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
    )


def _decode(node: Any, tensors: dict[str, StoredTensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[str(node["tensor"])]
    [(kind, content)] = node.items()
    if kind in {"dict", "Counter"}:
        pairs = {key: _decode(item, tensors) for key, item in content}
        return Counter(pairs) if kind == "Counter" else pairs
    if kind in {"list", "tuple"}:
        items = [_decode(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    return Other(content)


class NotPlain(Exception):
    """A value of a state that is not made of numbers and texts."""


def plain_json(value: Any, where: str = "it") -> Any:
    """Return a state as JSON, in the form in which a run saves what it tracks; raise `NotPlain` for a tensor.

    >>> plain_json({"milestones": Counter({3: 1}), "betas": (0.9, None)})
    {'dict': [['milestones', {'Counter': [[3, 1]]}], ['betas', {'tuple': [0.9, None]}]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {kind: [[key, plain_json(item, str(key))] for key, item in value.items()]}
    if isinstance(value, StoredTensor | Other):
        raise NotPlain(f"{where} is a {value.kind if isinstance(value, Other) else 'tensor'}")
    items = [plain_json(item, where) for item in value]
    return {"tuple": items} if isinstance(value, tuple) else items
