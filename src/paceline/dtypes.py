"""The element types that files hold: width and name of each in safetensors, numpy and torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class _ElementType(NamedTuple):
    width: int
    torch: str
    numpy: str = ""


_TYPES = {
    "F64": _ElementType(8, "float64", "float64"),
    "F32": _ElementType(4, "float32", "float32"),
    "F16": _ElementType(2, "float16", "float16"),
    "BF16": _ElementType(2, "bfloat16"),
    "C64": _ElementType(8, "complex64", "complex64"),
    "I64": _ElementType(8, "int64", "int64"),
    "I32": _ElementType(4, "int32", "int32"),
    "I16": _ElementType(2, "int16", "int16"),
    "I8": _ElementType(1, "int8", "int8"),
    "U64": _ElementType(8, "uint64", "uint64"),
    "U32": _ElementType(4, "uint32", "uint32"),
    "U16": _ElementType(2, "uint16", "uint16"),
    "U8": _ElementType(1, "uint8", "uint8"),
    "BOOL": _ElementType(1, "bool", "bool"),
    "F8_E4M3": _ElementType(1, "float8_e4m3fn"),
    "F8_E5M2": _ElementType(1, "float8_e5m2"),
}

WIDTHS = {name: element.width for name, element in _TYPES.items()}
"""Bytes of one element, by safetensors name."""
NUMPY_NAMES = {name: element.numpy for name, element in _TYPES.items() if element.numpy}
"""The numpy name, by safetensors name; numpy has no bfloat16 and no float8."""
SAFETENSORS_NAMES = {numpy: name for name, numpy in NUMPY_NAMES.items()}
"""The safetensors name, by numpy name."""


@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtype of every safetensors name. Imports torch.

    >>> torch_dtypes()["BF16"]
    torch.bfloat16
    """
    import torch

    return {name: getattr(torch, element.torch) for name, element in _TYPES.items()}
