"""Where compiled code is kept, how large it is, and whether only its owner can write it."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.doctor.finding import Finding, passed, problem
from paceline.units import human_size
from paceline.world.compile_cache import FIX, cache_root, cache_use, why_untrusted


def judge_compiled_code(env: Mapping[str, str]) -> Finding:
    """Judge the folder that keeps code of torch.compile and Triton between starts."""
    root = cache_root(env)
    if not root.is_dir():
        return passed("compiled code", f"none yet; it will be kept in {root}")
    if reason := why_untrusted(root):
        return problem("compiled code", reason, FIX)
    folders, size_bytes = cache_use(root)
    kinds = "kind" if folders == 1 else "kinds"
    text = f"{root}: {human_size(size_bytes)} for {folders} {kinds} of torch, GPU and settings"
    return passed("compiled code", f"{text}; `rm -r {root}` removes it")
