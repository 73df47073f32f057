"""Memory and utilization of this rank's GPU: from torch's allocator, and from the driver's library NVML."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping

import torch


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: shares of time in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpu_usage(device: str) -> Callable[[], Mapping[str, float]]:
    """Return a function that reads the GPU of a device; on a CPU it returns nothing."""
    return dict if device == "cpu" else _GpuUsage(torch.device(device)).read


class _GpuUsage:
    """Opens NVML at the first reading: that may take a while, and happens in the thread of the heartbeat."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: Callable[[], float | None] | None = None

    def read(self) -> dict[str, float]:
        """Return the memory of torch's allocator, which needs no call of the driver, and how busy the GPU is."""
        stats = torch.cuda.memory_stats(self._device)
        found = {
            "gpu_bytes": float(stats.get("reserved_bytes.all.current", 0)),
            "gpu_peak_bytes": float(stats.get("allocated_bytes.all.peak", 0)),
        }
        if self._busy is None:
            self._busy = _open_nvml(self._device)
        busy = self._busy()
        return found if busy is None else found | {"gpu_busy": busy}


def _open_nvml(device: torch.device) -> Callable[[], float | None]:
    """Return a function that reads the utilization of a GPU; None: the driver does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        # By its UUID: NVML counts all GPUs, torch only those in CUDA_VISIBLE_DEVICES.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return lambda: None

        def busy() -> float | None:
            rates = _Utilization()
            failed = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
            return None if failed else rates.gpu / 100

        return busy
    return lambda: None
