"""Input of `paceline verify`: digests of everything that a run holds after every step, and the trace of one step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from paceline.config import RunConfig
from paceline.exact.row import StepSums
from paceline.exact.sharded_tensor import whole
from paceline.exact.state import digest_of, digests_of_all
from paceline.exact.step import Updates
from paceline.exact.strategy import Strategy
from paceline.rundir import make_private, write_whole
from paceline.safe_open import open_to_write
from paceline.scale.batch import LaneChoice
from paceline.train.saving.run_state import Registered, RunState
from paceline.train.saving.tracked import PREFIX
from paceline.verified import save_facts
from paceline.verify.experiments import arranged
from paceline.verify.records import RECORD_FILE
from paceline.verify.step_trace import StepTrace, text_digest
from paceline.verify.tensor_diff import DUMP_FILE, GRADIENT, NARROW, PARAMETERS
from paceline.verify.traces import trace_file
from paceline.world.collectives import all_gather_rows
from paceline.world.world import World


class Recorder:
    """Writes the record of a run: the `Examiner` of its loop, which loads this file by its name."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world, self._exact = config.record, world, config.exact
        self._folder = Path(config.record.to)
        self.choice: LaneChoice | None = None
        if self._config.arrangement != "usual":
            choose = partial(arranged, how=self._config.arrangement)
            self.choice = LaneChoice(self._config.dump_step - 1, choose)
        self.last_step, self.save_step = self._config.steps, self._config.save_step
        self._trace: StepTrace | None = None

    def begin(
        self, done: int, strategy: Strategy, parts: Registered, updates: Updates, state: RunState
    ) -> None:
        """Record the state before the first step, or after the one that was restored."""
        self._parts, self._updates, self._state = parts, updates, state
        self._can_trace = type(updates) is Updates and not strategy.shards
        self._is_replicated = not strategy.replicas
        config, batches = state.config, state.batches
        per_epoch = batches.plan.steps_per_epoch
        if per_epoch <= self._config.epoch_steps:
            self.last_step = max(self.last_step, 2 * per_epoch + 1)
        last = min(self.last_step or batches.total_steps, batches.total_steps)
        self.save_step = self.save_step or _step_to_resume_after(per_epoch, last)
        head = {
            "world": self._world.size,
            "lanes": config.batch.lanes,
            "exact": config.exact,
            # What local SGD sends has the same bits in every world, compressed or not.
            "compression": "none" if strategy.replicas else config.compression,
            "precision": config.precision,
            "epoch_steps": batches.cut_to,
            "workers": config.read.workers if batches.may_use_workers else -1,
            "save_step": self.save_step,
        }
        if self._world.is_main:
            make_private(self._folder)
        self._write(head)
        self._line(done, float("nan"), {})
        if self._world.is_main:
            script = state.script
            save_facts(self._folder, script.identity(), script.sources)

    def before_step(self, index: int) -> None:
        """Begin the trace of a step, if it is the one."""
        if self._can_trace and index + 1 == self._config.dump_step:
            file = trace_file(self._folder, self._world.rank)
            self._trace = StepTrace(file, self._parts, self._digests)
            self._trace.keeps_gradients = not self._exact
            self._updates.observer = self._trace

    def after_step(self, done: int, sums: StepSums, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        total = self._updates.total(StepSums(sums.loss, sums.counted))
        counted = float(total.counted)
        loss = float(total.loss) / counted if counted else 0.0
        gradients: Mapping[str, Tensor] = {}
        if self._trace is not None:
            self._trace.end(metrics)
            gradients = self._trace.gradients
            self._trace = self._updates.observer = None
        self._line(done, loss, metrics)
        if done == self._config.dump_step:
            self._dump(gradients)

    def _digests(self) -> dict[str, str]:
        tensors = self._state.recorded()
        found = {name: digest_of(name, whole(value))[:16] for name, value in tensors.items()}
        facts = self._state.facts()
        if not self._exact:
            facts = {name: _to_three_digits(value) for name, value in facts.items()}
        return found | {name: text_digest(value) for name, value in facts.items()}

    def _line(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        digests = self._digests()
        agree = not self._is_replicated or self._ranks_agree(digests)
        own = digests_of_all(self._world, self._updates.own_state())
        line = {
            "step": step,
            "loss": float(loss).hex(),
            "metrics": {name: float(value).hex() for name, value in metrics.items()},
            "ranks_agree": agree,
            "tensors": digests | {name: digest[:16] for name, digest in own.items()},
        }
        self._write(line)

    def _ranks_agree(self, digests: dict[str, str]) -> bool:
        """Return whether all ranks hold the same; tracked numbers may differ by rounding without `exact`."""
        if not self._exact:
            tracked = {name for name in self._state.facts() if name.startswith(PREFIX)}
            digests = {name: digests[name] for name in digests if name not in tracked}
        return len(self._distinct_digests(json.dumps(digests).encode())) == 1

    def _dump(self, gradients: Mapping[str, Tensor]) -> None:
        """Write all tensors after a step, and its gradients."""
        tensors, narrow = {}, []
        for name, value in (self._state.recorded() | dict(self._updates.own_state())).items():
            tensors[name] = _comparable(whole(value))
            if _is_narrow(value):
                narrow.append(name)
        for name, value in gradients.items():
            tensors[f"{GRADIENT}{name}"] = _comparable(value)
        if self._world.is_main:
            named = self._parts.model.named_parameters(remove_duplicate=False)
            weights = [f"model.{name}" for name, _ in named]
            metadata = {PARAMETERS: json.dumps(weights), NARROW: json.dumps(narrow)}
            write_whole(self._folder / DUMP_FILE, to_safetensors(tensors, metadata))

    def _distinct_digests(self, content: bytes) -> list[int]:
        """Return the distinct digests over all ranks of a value that may differ between them."""
        start = bytearray(hashlib.sha256(content).digest()[:8])
        digest = torch.frombuffer(start, dtype=torch.int64)
        return sorted(set(all_gather_rows(self._world, digest).flatten().tolist()))

    def _write(self, line: Mapping[str, object]) -> None:
        if self._world.is_main:
            descriptor = open_to_write(self._folder / RECORD_FILE, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _step_to_resume_after(per_epoch: int, last: int) -> int:
    """Return the step after which verify resumes: within the second epoch, with the end of that one to come.

    What a loop changes once per epoch, such as a scheduler, has changed by then, and changes once more.

    >>> _step_to_resume_after(4, last=9), _step_to_resume_after(1, last=8), _step_to_resume_after(16, last=8)
    (6, 1, 4)
    """
    within_second = per_epoch + per_epoch // 2
    return within_second if within_second < last else max(1, min(per_epoch, last) // 2)


def _to_three_digits(value: object) -> object:
    """Return options without what rounding may change: some optimizers compute them from gradients."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return {name: _to_three_digits(each) for name, each in value.items()}
    return [_to_three_digits(each) for each in value] if isinstance(value, list | tuple) else value


def _is_narrow(value: Tensor) -> bool:
    return value.is_floating_point() and value.element_size() < 4


def _comparable(value: Tensor) -> Tensor:
    """Return a copy that NumPy can read."""
    return (value.float() if _is_narrow(value) else value).cpu().contiguous().clone()
