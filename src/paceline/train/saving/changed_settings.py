"""Which settings must not change when a run resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.checkpoint.manifest import Manifest
from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.train.saving.imported_state import is_imported

# Settings that may change between two starts of one run.
_FREE = {
    "name", "runs", "resume", "stop_after", "evaluate_steps", "compare_steps", "epochs", "steps", "parallel", "shard_over", "device", "backend",
    "capture", "read.resident_gb", "read.prefetch_steps", "read.workers", "read.cache", "read.cache_gb",
}  # fmt: skip
_BY_DEVICE = {"precision", "compile"}
"""What a recipe chooses for a GPU, so the same command has other values without one."""
_FREE_TABLES = {"checkpoint", "log", "timeout", "record", "profile"}


def changed_settings(
    manifest: Manifest, config: RunConfig, facts: Mapping[str, str], samples: int
) -> list[str]:
    """Return the settings, facts of the optimizer and numbers of samples that differ from those of a checkpoint."""
    if is_imported(manifest):
        return []
    now = dict(flatten(config)) | dict(facts)
    now["dataset_samples"] = samples
    before = dict(manifest.config) | dict(manifest.values["optimizer"])
    before["dataset_samples"] = manifest.values["dataset_samples"]
    changed = []
    for name, value in now.items():
        is_free = name in _FREE or name.partition(".")[0] in _FREE_TABLES
        if not is_free and before.get(name, value) != value:
            changed.append(f"{name} {before[name]} -> {value}")
    return changed


def as_begun(manifest: Manifest, changed: Sequence[str]) -> str:
    """Return what to type to resume as the run began, if only what suits a device differs; else nothing."""
    names = [text.partition(" ")[0] for text in changed]
    if set(names) - _BY_DEVICE:
        return ""
    words = [f"{name}={str(manifest.config[name]).lower()}" for name in names]
    return f"resume as it began with {' '.join(words)}, "
