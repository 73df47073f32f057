"""Does a run over NCCL leave the explanation of failures to the watchdog?"""

import ctypes
import os
from pathlib import Path

import torch

import paceline
from paceline.config import RunConfig
from paceline.world.device import silence_nccl
from support.processes import run_on_processes


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


def convolve(given: dict[str, str]) -> tuple[bool, str]:
    """Return whether a run has left a list of compiled code in /tmp, and what oneDNN was told."""
    os.environ.pop("ONEDNN_JIT_PROFILE", None)
    os.environ |= given
    with paceline.Run(RunConfig(device="cpu")):
        torch.nn.Conv2d(1, 8, 3)(torch.randn(2, 1, 28, 28))
    return Path(f"/tmp/perf-{os.getpid()}.map").exists(), os.environ["ONEDNN_JIT_PROFILE"]


def test_a_run_leaves_no_list_of_compiled_code_in_tmp(tmp_path):
    for given, told in (({}, "0"), ({"ONEDNN_JIT_PROFILE": "1"}, "1")):
        [found] = run_on_processes(convolve, 1, tmp_path, {}, {"given": given})
        assert found == (False, told)
