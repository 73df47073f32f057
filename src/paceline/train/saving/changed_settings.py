"""Which settings must not change when a run resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.checkpoint.manifest import Manifest
from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.train.saving.imported_state import is_imported

# Settings that may change between two starts of one run.
_FREE = {
    "name", "runs", "resume", "stop_after", "evaluate_steps", "compare_steps", "epochs", "steps", "parallel", "shard_over", "device", "backend",
    "capture", "read.resident_gb", "read.prefetch_steps", "read.workers", "read.cache", "read.cache_gb",
}  # fmt: skip
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
