"""Does a run over NCCL leave the explanation of failures to the watchdog?"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
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


CONVOLUTION = """
import os, sys
from pathlib import Path
import torch, paceline
with paceline.Run(paceline.RunConfig(runs=sys.argv[1], device="cpu")):
    torch.nn.Conv2d(1, 8, 3)(torch.randn(2, 1, 28, 28))
print(Path(f"/tmp/perf-{os.getpid()}.map").exists(), os.environ["ONEDNN_JIT_PROFILE"])
"""


@pytest.mark.parametrize(("given", "printed"), [(None, "False 0"), ("1", "False 1")])
def test_a_run_leaves_no_list_of_compiled_code_in_tmp(given, printed, tmp_path):
    env = {name: value for name, value in os.environ.items() if "JIT_PROFILE" not in name}
    env |= {"ONEDNN_JIT_PROFILE": given} if given else {}
    words = [sys.executable, "-c", CONVOLUTION, str(tmp_path)]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith(printed)
