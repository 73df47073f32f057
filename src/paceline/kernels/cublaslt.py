"""Matrix products in bf16 by cuBLASLt: the library behind torch's products, with a choice of the algorithm.

torch takes the first algorithm that cuBLASLt proposes. Others may be faster, and cuBLASLt can compute GELU, or multiply
by its gradient, before the product is written.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes that the address of every matrix must be a multiple of: what cuBLASLt expects, and torch's memory has."""
_PROPOSALS = 16
_BF16, _FP32, _COMPUTE_FP32 = 14, 0, 68
# Attributes of a description, and of a preference
_TRANSPOSE_WEIGHT, _EPILOGUE, _BIAS, _AUX, _AUX_STRIDE, _AUX_TYPE = 3, 7, 8, 11, 12, 22
_WORKSPACE = 1
_MAX_WORKSPACE_BYTES = 32 << 20
_SETTING_BYTES = (4, 4, 4, 4, 4, 4, 4, 2, 2)  # number, tile, pieces, reduction, ... of an algorithm
_PIECES, _REDUCTION = 2, 3


class Epilogue(IntEnum):
    """What cuBLASLt does with a product before it writes it."""

    NONE = 1
    BIAS = 4
    GELU = 160
    """Write the product to `aux`, and its GELU (tanh approximation) as the result."""
    GELU_BIAS = 164
    GELU_GRADIENT = 192
    """Multiply by the gradient of GELU at `aux`."""


class Problem(NamedTuple):
    """One kind of product: [rows, inner] times a weight."""

    rows: int
    outputs: int
    inner: int
    transposed: bool
    """Whether the weight is [outputs, inner], as that of a linear layer, or [inner, outputs]."""
    epilogue: Epilogue


class Operands(NamedTuple):
    """The matrices of a product, all of them contiguous."""

    inputs: Tensor
    weight: Tensor
    result: Tensor
    bias: Tensor | None = None
    aux: Tensor | None = None


class _Opaque(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Opaque),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Algorithm(NamedTuple):
    """An algorithm that cuBLASLt proposes for a product."""

    opaque: _Opaque
    settings: tuple[int, ...]
    """What tells it from the others of the same library and GPU."""
    workspace_bytes: int = 0


class Plan:
    """What cuBLASLt must know of one kind of product."""

    def __init__(self, problem: Problem, device: int) -> None:
        rows, outputs, inner = problem[:3]
        self._device, self._problem = device, problem
        self._description = _made(
            "MatmulDescCreate", ctypes.c_int(_COMPUTE_FP32), ctypes.c_int(_FP32)
        )
        self._set(_TRANSPOSE_WEIGHT, ctypes.c_int(problem.transposed))
        self._set(_EPILOGUE, ctypes.c_uint32(problem.epilogue))
        # cuBLASLt counts along columns, so it computes the transpose: weight times inputs.
        self._weight = _layout(inner, outputs) if problem.transposed else _layout(outputs, inner)
        self._inputs, self._result = _layout(inner, rows), _layout(outputs, rows)

    def algorithms(self, operands: Operands) -> list[Algorithm]:
        """Return what cuBLASLt proposes, its favourite first: algorithms that sum each result in one piece."""
        self._point_to(operands)
        preference = _made("MatmulPreferenceCreate")
        workspace = _sized(ctypes.c_uint64(_MAX_WORKSPACE_BYTES))
        _call("MatmulPreferenceSetAttribute", preference, ctypes.c_int(_WORKSPACE), *workspace)
        found, count = (_Proposal * _PROPOSALS)(), ctypes.c_int()
        layouts = (self._weight, self._inputs, self._result, self._result)
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            _handle(self._device), self._description, *layouts, preference,
            ctypes.c_int(_PROPOSALS), found, ctypes.byref(count),
        )  # fmt: skip
        _call("MatmulPreferenceDestroy", preference)
        proposals = [] if status else [one for one in found[: count.value] if not one.state]
        algorithms = [
            Algorithm(one.algorithm, _settings(one.algorithm), one.workspace) for one in proposals
        ]
        return [
            one for one in algorithms if one.settings[_PIECES] == 1 and not one.settings[_REDUCTION]
        ]

    def run(self, algorithm: Algorithm, operands: Operands) -> None:
        """Compute a product on the current stream."""
        self._point_to(operands)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        result = ctypes.c_void_p(operands.result.data_ptr())
        size = algorithm.workspace_bytes
        workspace = operands.inputs.new_empty(size, dtype=torch.uint8)
        _call(
            "Matmul", _handle(self._device), self._description, ctypes.byref(ctypes.c_float(1)),
            ctypes.c_void_p(operands.weight.data_ptr()), self._weight,
            ctypes.c_void_p(operands.inputs.data_ptr()), self._inputs,
            ctypes.byref(ctypes.c_float(0)), result, self._result, result, self._result,
            ctypes.byref(algorithm.opaque), ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )  # fmt: skip

    def _point_to(self, operands: Operands) -> None:
        if operands.bias is not None:
            self._set(_BIAS, ctypes.c_void_p(operands.bias.data_ptr()))
        if operands.aux is not None:
            self._set(_AUX, ctypes.c_void_p(operands.aux.data_ptr()))
            self._set(_AUX_STRIDE, ctypes.c_int64(self._problem.outputs))
            self._set(_AUX_TYPE, ctypes.c_int(_BF16))

    def _set(self, name: int, value: Any) -> None:
        _call("MatmulDescSetAttribute", self._description, ctypes.c_int(name), *_sized(value))


@cache
def version() -> int:
    """Return the version of the cuBLASLt that torch has loaded; 0 if it has none."""
    library = _library()
    if library is None:
        return 0
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


@cache
def _library() -> Any:
    """Return the library that torch has loaded; None if it has none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = (line.split(maxsplit=5)[-1] for line in lines if "libcublasLt.so" in line)
    path = next(paths, None)
    try:
        return ctypes.CDLL(path) if path else None
    except OSError:  # replaced by an upgrade since it was loaded
        return None


@cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _made("Create")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} returned status {status}")


def _made(name: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(name, ctypes.byref(made), *arguments)
    return made


def _layout(height: int, width: int) -> ctypes.c_void_p:
    """Return the layout of a matrix whose columns are contiguous."""
    sizes = ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
    return _made("MatrixLayoutCreate", ctypes.c_int(_BF16), *sizes)


def _sized(value: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


def _settings(algorithm: _Opaque) -> tuple[int, ...]:
    values = []
    for name, size in enumerate(_SETTING_BYTES):
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        _call(
            "MatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), ctypes.c_int(name),
            ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written),
        )  # fmt: skip
        values.append(value.value)
    return tuple(values)
