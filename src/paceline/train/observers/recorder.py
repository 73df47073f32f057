"""Input of `paceline verify`: a digest of every tensor after every step, and facts that explain differences."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.nest import leaves_of
from paceline.data.reading.source import Batch
from paceline.rundir import DUMP_FILE, RECORD_FILE, make_private, write_whole
from paceline.safe_open import open_to_write
from paceline.train.model.sharded_tensor import whole
from paceline.train.saving.state import NOTHING, content, digest_of, digests_of_all, named_state
from paceline.world.collectives import all_gather_rows, sum_across
from paceline.world.world import World

_48_BITS = 0xFFFFFFFFFFFF


class Recorder:
    """Writes the record of a run for `paceline verify`; idle otherwise. Also for hand-written loops."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config.record, world
        self._facts = {"world": world.size, "exact": config.exact}
        if self.active and world.is_main:
            make_private(Path(self._config.to))

    @property
    def active(self) -> bool:
        """Whether this run is recorded."""
        return bool(self._config.to)

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: Mapping[str, Tensor] = NOTHING,
    ) -> None:
        """Record the initial weights. Every rank must call this."""
        if self.active:
            kinds = {type(module).__name__ for module in model.modules()}
            norms = sorted(kind for kind in kinds if "BatchNorm" in kind)
            epsilon = 0.0
            for value in model.parameters():
                if value.is_floating_point():
                    epsilon = max(epsilon, torch.finfo(value.dtype).eps)
            self._write(self._facts | {"norms": norms, "epsilon": epsilon})
            self._state(0, float("nan"), 0, dict(named_state(model, optimizer)), model, own)

    def step(
        self,
        step: int,
        loss: float,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[Batch] = (),
        own: Mapping[str, Tensor] = NOTHING,
    ) -> bool:
        """Record one finished step, counted from 1; return whether verify has enough. Every rank must call this.

        `own` is state that only this rank holds; a dump contains that of rank 0.
        """
        if not self.active:
            return False
        shared = dict(named_state(model, optimizer))
        self._state(step, loss, self._samples(batches), shared, model, own)
        if step == self._config.dump_step:
            tensors = {}
            for name, value in (shared | dict(own)).items():
                tensors[name] = _comparable(whole(value))
            if self._world.is_main:
                write_whole(Path(self._config.to) / DUMP_FILE, to_safetensors(tensors))
        return step == self._config.steps

    def _samples(self, batches: Iterable[Batch]) -> int:
        """Return a digest of the samples that all ranks used, independent of their order."""
        digest = 0
        for batch in batches:
            digest += _batch_digest(batch)
        total = sum_across(self._world, torch.tensor([digest & _48_BITS]))
        return int(total.item()) & _48_BITS

    def _state(
        self,
        step: int,
        loss: float,
        samples: int,
        state: Mapping[str, Tensor],
        model: nn.Module,
        own: Mapping[str, Tensor],
    ) -> None:
        digests = {name: digest_of(name, whole(value))[:16] for name, value in state.items()}
        # Without buffers: BatchNorm statistics of plain DDP differ between ranks, and verify reports them separately.
        buffers = {f"model.{name}" for name, _ in model.named_buffers()}
        shared = {name: digest for name, digest in digests.items() if name not in buffers}
        own_digests = digests_of_all(self._world, own)
        line = {
            "step": step,
            "loss": float(loss).hex(),
            "samples": samples,
            "ranks_agree": len(self._distinct_digests(json.dumps(shared).encode())) == 1,
            "generators": self._distinct_digests(torch.get_rng_state().numpy().tobytes()),
            "tensors": digests | {name: digest[:16] for name, digest in own_digests.items()},
        }
        self._write(line)

    def _distinct_digests(self, content: bytes) -> list[int]:
        """Return the distinct digests over all ranks of a value that may differ between them."""
        start = bytearray(hashlib.sha256(content).digest()[:8])
        digest = torch.frombuffer(start, dtype=torch.int64)
        return sorted(set(all_gather_rows(self._world, digest).flatten().tolist()))

    def _write(self, line: dict[str, object]) -> None:
        if self._world.is_main:
            descriptor = open_to_write(
                Path(self._config.to) / RECORD_FILE, os.O_WRONLY | os.O_APPEND
            )
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _batch_digest(batch: Batch) -> int:
    """Return the sum of the digests of a lane's rows; what is not one row per sample counts as a whole."""
    leaves = [leaf for leaf in leaves_of(_opened(batch)) if isinstance(leaf, Tensor)]
    rows = min((len(leaf) for leaf in leaves if leaf.ndim), default=0)
    by_row = [leaf for leaf in leaves if leaf.ndim and len(leaf) == rows]
    digest = 0
    for row in range(rows):
        digest += _digest([leaf[row] for leaf in by_row])
    others = [leaf for leaf in leaves if not any(leaf is each for each in by_row)]
    return digest + (_digest(others) if others else 0)


def _opened(batch: Batch) -> Batch:
    """Return the content of a batch that moves itself to a device, such as transformers' BatchEncoding."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=5)
    for tensor in tensors:
        digest.update(content(tensor))
    return int.from_bytes(digest.digest(), "big")


def _comparable(value: Tensor) -> Tensor:
    """Return a copy that NumPy can read."""
    narrow = value.is_floating_point() and value.element_size() < 4
    return (value.float() if narrow else value).cpu().contiguous().clone()
