"""Copy the tensors of a torch.save file into a safetensors file, and the rest into JSON.

`python -m paceline.checkpoint.importing.torch_file FILE FOLDER`. This is the only place that reads a pickle: with
torch's restricted loader, which accepts tensors and plain containers and calls nothing that the file names, and in a
process of its own, which no other module imports.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.importing.tree import TENSORS, TREE
from paceline.checkpoint.staging import DTYPE_NAMES, flat_bytes
from paceline.rundir import write_whole
from paceline.tensorfile import Spec, plan_file

_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")


def main() -> None:
    """Write both files into the folder, or the reason why the file cannot be read."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tensors = _Tensors()
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
        report: dict[str, Any] = {"content": tensors.encode(loaded)}
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        report = _failure(error)
    tensors.write(folder / TENSORS)
    write_whole(folder / TREE, json.dumps(report).encode(), durable=False)


def _failure(error: Exception) -> dict[str, str]:
    """Return the name that the restricted loader refuses, or another reason in one line."""
    text = str(error)
    if match := _FORBIDDEN.search(text):
        return {"refused": match[1].rstrip(".")}
    if "TorchScript" in text:
        return {"refused": "TorchScript"}
    says_why = isinstance(error, RuntimeError | OSError) and text
    reason = text.partition("\n")[0].partition(". ")[0] if says_why else ""
    return {"unreadable": reason or "it is not a complete torch.save file"}


class _Tensors:
    """The tensors of a file, each once, numbered in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._values: list[Tensor] = []

    def encode(self, value: Any) -> Any:
        """Return a value as JSON, with a number in place of each tensor."""
        if isinstance(value, Tensor):
            return self._encode_tensor(value.detach())
        if isinstance(value, Mapping):
            kind = (
                "Counter" if isinstance(value, Counter) else "dict"
            )  # MultiStepLR counts its milestones
            return {kind: [[_key(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.encode(item) for item in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return {"other": type(value).__name__}

    def _encode_tensor(self, value: Tensor) -> dict[str, Any]:
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if not is_plain or value.device.type != "cpu" or value.dtype not in DTYPE_NAMES:
            return {"other": f"tensor of {value.dtype}, {value.layout}, {value.device}"}
        same = (value.untyped_storage().data_ptr(), value.storage_offset(), value.stride())
        identity = (same, value.dtype, value.shape) if value.numel() else id(value)
        if identity not in self._numbers:
            self._numbers[identity] = len(self._values)
            self._values.append(value)
        return {"tensor": self._numbers[identity]}

    def write(self, path: Path) -> None:
        """Write all tensors, named by their numbers."""
        specs = {}
        for number, value in enumerate(self._values):
            specs[Spec(str(number), DTYPE_NAMES[value.dtype], tuple(value.shape))] = value
        layout = plan_file(specs)
        with path.open("wb") as file:
            file.write(layout.header)
            for place in layout.places:
                file.write(memoryview(flat_bytes(specs[place.spec]).numpy()))  # type: ignore[arg-type]


def _key(key: object) -> str | int:
    return key if isinstance(key, str | int) else str(key)


if __name__ == "__main__":
    main()
