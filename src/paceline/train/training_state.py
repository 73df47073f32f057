"""Everything a checkpoint holds, and which settings must not change when a run resumes from it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.config import RunConfig
from paceline.config.values import flatten
from paceline.data.reading.batches import Batches
from paceline.train.imported_state import fitted, is_imported, missing_kinds
from paceline.train.meter import Meter
from paceline.train.optimizer_step import OptimizerStep
from paceline.train.state import named_state, optimizer_facts
from paceline.version import VERSION
from paceline.world.world import World

# Settings that may change between two starts of one run.
_FREE = {
    "name", "runs", "resume", "stop_after", "evaluate_steps", "epochs", "steps", "parallel", "shard_over", "device", "backend",
    "capture", "read.resident_gb", "read.prefetch_steps", "read.workers", "read.cache", "read.cache_gb",
}  # fmt: skip
_FREE_TABLES = {"checkpoint", "log", "timeout", "record", "profile"}


@dataclass(frozen=True)
class TrainingState:
    """All objects whose state a checkpoint holds."""

    world: World
    config: RunConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    optimizer_step: OptimizerStep
    meters: Mapping[str, Meter]

    @property
    def size_bytes(self) -> int:
        """Bytes of a checkpoint, as far as this rank knows them."""
        tensors = {**self.tensors(), **self.own_tensors()}
        return sum(value.nbytes for value in tensors.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, buffers and optimizer state by name: the same names on every rank."""
        return dict(named_state(self.model, self.optimizer))

    def own_tensors(self) -> Mapping[str, Tensor]:
        """Return the state that only this rank holds."""
        return self.optimizer_step.own_state()

    def manifest(self, step: int, metrics: Mapping[str, float]) -> Manifest:
        """Return the checkpoint's description, without its files. Every rank must call this."""
        meters = {}
        for name, meter in self.meters.items():
            meters[name] = meter.state(self.optimizer_step)
        return Manifest(
            step=step,
            samples=self.batches.plan.seen_after(step),
            files={},
            metrics=dict(metrics),
            values={
                "meters": meters,
                "numbers": self.optimizer_step.numbers(),
                "optimizer": optimizer_facts(self.optimizer),
                "dataset_samples": self.batches.plan.samples,
                "world_size": self.world.size,
                "precision": self.optimizer_step.precision.state(),
            },
            config=dict(flatten(self.config)),
            versions={
                "paceline": VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )

    def load(self, manifest: Manifest, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Restore everything from a checkpoint; return the tensors that do not match the model."""
        if is_imported(manifest):
            problems = missing_kinds(manifest, self.optimizer)
            loaded = fitted(tensors, self.model)
            return problems + self.optimizer_step.load(loaded, manifest.values["numbers"])
        problems = self.optimizer_step.load(tensors, manifest.values["numbers"])
        before = manifest.values["optimizer"]["optimizer"]
        now = optimizer_facts(self.optimizer)["optimizer"]
        if before != now:
            problems.insert(0, f"the optimizer was {before}, is {now}")
        if problems:
            return problems
        self.optimizer_step.precision.restore(manifest.values.get("precision", []))
        # Sums over all ranks must be counted once when they are added up over ranks again.
        keeps_sums = self.optimizer_step.totals_are_global or self.world.is_main
        for name, meter in self.meters.items():
            meter.restore(manifest.values["meters"][name], keep=keeps_sums)
        return []

    def changed_settings(self, manifest: Manifest) -> list[str]:
        """Return the settings that would make the rest of the run another training."""
        facts, samples = optimizer_facts(self.optimizer), self.batches.plan.samples
        return changed_settings(manifest, self.config, facts, samples)


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
