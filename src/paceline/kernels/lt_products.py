"""Matrix products with a GELU inside, by cuBLASLt, which torch has loaded: torch itself offers none that keeps its input.

cuBLASLt has several algorithms for a product. The fastest one is found by timing, among those that have the bits of the
first: so the choice, which may differ between ranks and starts, changes no result.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256  # which cuBLASLt assumes of every pointer
_MAPS = Path("/proc/self/maps")
_CANDIDATES, _ROUNDS, _RUNS = 8, 4, 3
# The numbers of cuBLAS's enumerations.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_TRANSA, _TRANSB, _EPILOGUE, _BIAS = 3, 4, 7, 8
_AUX, _AUX_LD, _AUX_TYPE, _BIAS_TYPE = 11, 12, 22, 26
_GELU_AUX, _GELU_AUX_BIAS, _DGELU = 160, 164, 192
_MAX_WORKSPACE = 1


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Shape(NamedTuple):
    """A product of column-major matrices: [rows, depth] times [depth, columns], the first one transposed or not."""

    rows: int
    columns: int
    depth: int
    transposed: bool
    epilogue: int


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return cuBLASLt as torch has loaded it; None if it has not."""
    if torch.version.cuda is None:
        return None
    with contextlib.suppress(OSError):
        for line in _MAPS.read_text(encoding="utf-8").splitlines():
            if "libcublasLt.so" in line:
                return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(library(), name)(*arguments):
        raise RuntimeError(f"{name} failed with status {status}")


def _new(name: str, *arguments: Any) -> ctypes.c_void_p:
    """Return a new object of the library."""
    made = ctypes.c_void_p()
    _call(name, ctypes.byref(made), *arguments)
    return made


@functools.cache
def _handle(_: int) -> ctypes.c_void_p:
    """Return the handle of a device."""
    return _new("cublasLtCreate")


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    return _new("cublasLtMatrixLayoutCreate", ctypes.c_int(_R_16BF), *sizes)


def _aligned(value: Tensor) -> Tensor:
    return value.clone() if value.data_ptr() % _ALIGNMENT_BYTES else value


def _pointer(value: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(value.data_ptr())


class _Product:
    """One product on one device, with the algorithm that was chosen for it."""

    def __init__(self, shape: _Shape, device: int) -> None:
        self._device = device
        self._description = _new(
            "cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F)
        )
        rows, columns, depth, transposed, epilogue = shape
        self._set(_TRANSA, ctypes.c_int(transposed))
        self._set(_TRANSB, ctypes.c_int(0))
        self._set(_EPILOGUE, ctypes.c_uint32(epilogue))
        self._set(_AUX_LD, ctypes.c_int64(rows))
        self._set(_AUX_TYPE, ctypes.c_int(_R_16BF))
        if epilogue == _GELU_AUX_BIAS:
            self._set(_BIAS_TYPE, ctypes.c_int(_R_16BF))
        first = _layout(depth, rows) if transposed else _layout(rows, depth)
        self._layouts = first, _layout(depth, columns), _layout(rows, columns)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._found: list[_Heuristic] | None = None
        self._is_chosen = False
        self._lock = threading.Lock()  # backward runs in another thread

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = "cublasLtMatmulDescSetAttribute"
        _call(name, self._description, ctypes.c_int(attribute), ctypes.byref(value), size)

    def run(
        self, first: Tensor, second: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None
    ) -> bool:
        """Compute the product, on the current stream; return whether this GPU can.

        `aux` is written by GELU, and read by its gradient.
        """
        first, second = _aligned(first), _aligned(second)
        with self._lock:
            self._set(_AUX, _pointer(aux))
            if bias is not None:
                self._set(_BIAS, _pointer(bias))
            if self._found is None:
                self._found = self._candidates()
            if self._found and not self._is_chosen and not torch.cuda.is_current_stream_capturing():
                self._found = [self._fastest(first, second, out, aux)]
                self._is_chosen = True
            if self._found:
                self._launch(self._found[0], first, second, out)
            return bool(self._found)

    def _candidates(self) -> list[_Heuristic]:
        """Return algorithms without a workspace, the most promising first; none if this GPU has none."""
        preference = _new("cublasLtMatmulPreferenceCreate")
        none = ctypes.c_uint64(0)
        _call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference, ctypes.c_int(_MAX_WORKSPACE), ctypes.byref(none), ctypes.c_size_t(8),
        )  # fmt: skip
        found, count = (_Heuristic * _CANDIDATES)(), ctypes.c_int()
        first, second, out = self._layouts
        with contextlib.suppress(RuntimeError):  # not supported
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(self._device), self._description, first, second, out, out, preference,
                ctypes.c_int(_CANDIDATES), found, ctypes.byref(count),
            )  # fmt: skip
        return list(found[: count.value])

    def _launch(self, chosen: _Heuristic, first: Tensor, second: Tensor, out: Tensor) -> None:
        layouts = self._layouts
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(
            "cublasLtMatmul",
            _handle(self._device), self._description,
            ctypes.byref(self._one), _pointer(first), layouts[0], _pointer(second), layouts[1],
            ctypes.byref(self._zero), _pointer(out), layouts[2], _pointer(out), layouts[2],
            ctypes.byref(chosen.algorithm), None, ctypes.c_size_t(0), stream,
        )  # fmt: skip

    def _fastest(self, first: Tensor, second: Tensor, out: Tensor, aux: Tensor) -> _Heuristic:
        """Return the fastest algorithm with the bits of the first one."""

        def run(one: _Heuristic) -> None:
            self._launch(one, first, second, out)

        candidates = self._found or []
        run(candidates[0])
        right = out.clone(), aux.clone()
        same = []
        for one in candidates:
            out.zero_()
            with contextlib.suppress(RuntimeError):  # an algorithm that does not support this
                run(one)
                if torch.equal(out, right[0]) and torch.equal(aux, right[1]):
                    same.append(one)
        times = [_milliseconds(functools.partial(run, one)) for one in same]
        return same[times.index(min(times))]


def _milliseconds(run: Callable[[], None]) -> float:
    """Return the milliseconds of the fastest of some rounds."""
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(_RUNS):
            run()
        ended.record()
        ended.synchronize()
        rounds.append(begun.elapsed_time(ended))
    return min(rounds)


@functools.cache
def _product(shape: _Shape, device: int) -> _Product:
    return _Product(shape, device)


def gelu_of_product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return GELU of inputs [rows, depth] times weight [width, depth] transposed, and that product; all in bf16.

    None if this GPU has no such product.
    """
    (rows, depth), width = inputs.shape, len(weight)
    out = inputs.new_empty(rows, width)
    before = torch.empty_like(out)
    epilogue = _GELU_AUX if bias is None else _GELU_AUX_BIAS
    shape = _Shape(width, rows, depth, transposed=True, epilogue=epilogue)
    is_done = _product(shape, inputs.device.index).run(weight, inputs, out, before, bias)
    return (out, before) if is_done else None


def gelu_gradient_of_product(grad: Tensor, weight: Tensor, before: Tensor) -> Tensor | None:
    """Return grad [rows, depth] times weight [depth, width], times the derivative of GELU at `before`; all in bf16.

    None if this GPU has no such product.
    """
    (rows, depth), width = grad.shape, weight.shape[1]
    out = grad.new_empty(rows, width)
    shape = _Shape(width, rows, depth, transposed=False, epilogue=_DGELU)
    return out if _product(shape, grad.device.index).run(weight, grad, out, before, None) else None
