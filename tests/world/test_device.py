"""Does a run over NCCL leave the explanation of failures to the watchdog?"""

import ctypes
from pathlib import Path

import torch

from paceline.config import RunConfig
from paceline.world.device import silence_nccl


def test_torch_is_silent_about_failures_that_the_watchdog_explains(monkeypatch):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = level.value
    for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "0")  # so that it is removed again
    try:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        silence_nccl(RunConfig())
        assert level.value == before
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        silence_nccl(RunConfig())
        assert level.value == 3
    finally:
        level.value = before
