"""What happened in one step on this rank, as digests: input of the experiments of `paceline verify`.

The stages of a step: its start, the lanes, the sum of their gradients, before and after each call of an optimizer,
the end. A stage that differs first tells what caused the difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.reading.batches import Lane
from paceline.data.reading.nest import leaves_of
from paceline.exact.state import content
from paceline.rundir import write_whole
from paceline.train.saving.run_state import Registered
from paceline.verify.traces import BODY, DRAWS
from paceline.world.randomness import generator_states

Facts = dict[str, str]


class StepTrace:
    """The stages of one step on this rank. `state` returns digests of everything that a rank holds."""

    def __init__(self, file: Path, parts: Registered, state: Callable[[], Facts]) -> None:
        self._file, self._parts, self._state = file, parts, state
        self._stages: list[tuple[str, Facts]] = []
        self._lanes: dict[int, Facts] = {}
        self._lane_gradients: dict[str, Tensor] = {}
        self._updates = 0
        self.keeps_gradients = False
        self.gradients: dict[str, Tensor] = {}
        """Those of the first update as the optimizer got them; the script may clear them later."""
        self._handles: list[Any] = []
        self._note("start", self._state())
        self._generators = generator_states()
        for name, parameter in self._parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(self._keep(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        for name, optimizer in self._parts.optimizers.items():
            self._listen(name, optimizer)

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._lane_gradients[name] = gradient.detach().clone()

        return keep

    def _listen(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        def before(*_: Any) -> None:
            self._note(f"before {name}", self._state() | self._sums())
            self._keep_gradients()

        def after(*_: Any) -> None:
            self._note(f"after {name}", self._state())

        self._handles += [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def begin_update(self) -> None:
        """Note whether the body of the loop has drawn random numbers before the first update."""
        if not self._updates:
            drawn = generator_states() != self._generators
            self._note(BODY, {DRAWS: "yes" if drawn else "no"})

    def lane(self, lane: Lane, output: Tensor) -> None:
        """Note what forward and backward of a lane computed; its buffers are not reset yet."""
        leaves = leaves_of(_opened(lane.batch))
        self._lanes[lane.number] = {
            "samples": fingerprint(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            "loss": fingerprint([output]),
            "gradients": fingerprint(value for _, value in sorted(self._lane_gradients.items())),
            "buffers": fingerprint(value for _, value in self._buffers()),
        }
        self._lane_gradients = {}

    def batch(self, number: int, sums: Tensor) -> None:
        """Note the sums of the metrics over one batch of an evaluation."""
        self._note(f"batch {number}", {"metrics": fingerprint([sums])})

    def summed(self) -> None:
        """Note the lanes of an update and the sum of their gradients over all ranks."""
        for number, facts in self._lanes.items():
            self._note(f"lane {number}", facts)
        self._lanes = {}
        self._note("sum", self._sums())
        self._updates += 1
        self._keep_gradients()

    def end(self, metrics: Mapping[str, float]) -> None:
        """Note the end of the step, and write the trace."""
        for handle in self._handles:
            handle.remove()
        self._note("end", self._state())
        values = {name: float(value).hex() for name, value in metrics.items()}
        self._note("evaluation", values)
        write_whole(self._file, json.dumps(self._stages).encode())

    def _keep_gradients(self) -> None:
        if not self.keeps_gradients or self._updates != 1:
            return
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad.detach().to("cpu", copy=True)

    def _note(self, stage: str, facts: Facts) -> None:
        self._stages.append((stage, facts))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._parts.model.named_parameters()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._parts.model.named_buffers()

    def _sums(self) -> Facts:
        found = {}
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                found[f"the gradient of {name}"] = digest(parameter.grad)
        return found


def _opened(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def digest(tensor: Tensor) -> str:
    """Return a short digest of a tensor."""
    return hashlib.blake2b(content(tensor.detach()), digest_size=8).hexdigest()


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a digest of some tensors and a weighted sum of their elements: how far two of them are apart.

    >>> fingerprint([torch.ones(2)]).split()[1]
    '1.5403023058681398'
    """
    digests, total = hashlib.blake2b(digest_size=8), 0.0
    for tensor in tensors:
        values = tensor.detach().flatten().cpu()
        digests.update(content(values))
        weights = torch.arange(values.numel(), dtype=torch.float64).cos()
        total += float((values.double() * weights).sum())
    return f"{digests.hexdigest()} {total!r}"


def text_digest(value: object) -> str:
    """Return a short digest of a value that has a text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
