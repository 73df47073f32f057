"""What a run tells the libraries of its device."""

import os
from pathlib import Path

import torch

import paceline
from paceline.config import RunConfig
from support.processes import run_on_processes


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
