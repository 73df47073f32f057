"""Time the collectives of a world, and check every result.

A batch is a few messages back to back, each in its own buffers, so that every result can be checked afterwards.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from paceline.config import BatchConfig, RunConfig, TimeoutConfig
from paceline.errors import EnvironmentUnfit
from paceline.measure.bench_operations import (
    MOST_RANKS,
    Operation,
    RunOperation,
    Sawtooth,
    make_operation,
)
from paceline.measure.bench_plan import ELEMENT_BYTES, BenchPlan
from paceline.measure.bench_results import Measurement, Mistake, Timing
from paceline.rundir import write_whole
from paceline.world.collectives import all_gather_rows, sum_across, wire_device
from paceline.world.device import choose_backend
from paceline.world.process_group import join, keep_to_loopback, wait_for_all
from paceline.world.world import World

_BATCH_S = 0.02
_BATCH_BYTES = 64 << 20
_UNTIMED = 1  # message before the clock starts: it finds idle queues and full token buckets
_FEWEST, _MOST = 4, 64  # messages of a batch, where time and memory allow
_SMALL_BYTES = 1 << 16  # latency counts below this: more messages hide that ranks start unevenly
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50
_LANES = 1 << 20  # more than any world has ranks
_RENDEZVOUS_S = 600.0
_COLLECTIVE_S = 300.0


def measure(plan: BenchPlan) -> Measurement:
    """Join the world, measure, and return the results of all ranks; rank 0 writes them to a file."""
    config = RunConfig(
        name="bench",
        device=plan.device,  # type: ignore[arg-type]
        backend=plan.backend,  # type: ignore[arg-type]
        exact=False,
        batch=BatchConfig(_LANES, _LANES),
        timeout=TimeoutConfig(_RENDEZVOUS_S, _COLLECTIVE_S),
    )
    with join(config) as world, _group_of_one(world, config):
        measurement = Bench(plan, world).run()
        if plan.to and world.is_main:
            write_whole(Path(plan.to), measurement.as_json().encode())
    return measurement


@contextmanager
def _group_of_one(world: World, config: RunConfig) -> Iterator[None]:
    """Create a process group for a single rank, so that its backend can be measured, too."""
    if world.size == 1:
        keep_to_loopback()
        store = HashStore()
        dist.init_process_group(
            choose_backend(world, config, store), store=store, rank=0, world_size=1
        )
    yield


@dataclass(eq=False)
class Case:
    """One operation at one size, and the times of its batches."""

    operation: Operation
    run: RunOperation
    messages: int = 1
    seconds: list[float] = field(default_factory=list)
    turn: int = 0


class Buffers:
    """The send and receive buffers of a batch, shared by all cases."""

    def __init__(self, largest: int, device: torch.device) -> None:
        self._numbers = max((1 + _UNTIMED) * largest, _BATCH_BYTES // ELEMENT_BYTES)
        self._sent, self._received = (torch.empty(self._numbers, device=device) for _ in range(2))

    def capacity(self, operation: Operation) -> int:
        """Return how many timed messages fit."""
        return max(1, self._numbers // max(operation.sent, operation.received) - _UNTIMED)

    def cut(self, case: Case) -> list[tuple[Tensor, Tensor]]:
        """Return the (sent, received) buffers of each message."""
        operation, count = case.operation, case.messages + _UNTIMED

        def pieces(buffer: Tensor, numbers: int) -> Iterable[Tensor]:
            return buffer[: numbers * count].view(count, numbers)

        sent = pieces(self._sent, operation.sent)
        received = pieces(self._received, operation.received)
        return list(zip(sent, received, strict=True))


class Bench:
    """Measures all operations at all sizes in rounds, so that a disturbance affects all alike."""

    def __init__(self, plan: BenchPlan, world: World) -> None:
        if world.size > MOST_RANKS:
            raise EnvironmentUnfit(
                f"sums over {world.size:,} ranks cannot be checked: float32 is exact up to {MOST_RANKS:,} ranks",
                fix=f"start at most {MOST_RANKS:,} ranks",
            )
        self._plan, self._world = plan, world
        self._device, self._wire = torch.device(world.device), wire_device(world)
        self._checked, self._mistakes = 0, list[Mistake]()
        largest = max(plan.sizes_bytes) // ELEMENT_BYTES + world.size
        try:
            self._sawtooth = Sawtooth(largest, world.size, self._device)
            self._buffers = Buffers(largest, self._device)
        except (RuntimeError, MemoryError) as error:
            raise EnvironmentUnfit(
                f"rank {world.rank} has not enough memory for messages of {max(plan.sizes_bytes):,} bytes",
                fix="give smaller --sizes: each rank needs five times the largest size",
            ) from error

    def run(self) -> Measurement:
        """Measure until the time is over, in at least three rounds."""
        names = [name for name in self._plan.operations if name != "pair" or self._world.size > 1]
        cases = [self._prepared(name, size) for name in names for size in self._plan.sizes_bytes]
        rounds, begun = 0, time.perf_counter()
        while self._continues(rounds, time.perf_counter() - begun):
            for case in cases:
                case.seconds.append(self._batch(case))
            rounds += 1
        return self._measurement(cases)

    def _continues(self, rounds: int, passed_s: float) -> bool:
        """Return whether there is another round; rank 0 decides for all."""
        wanted = rounds < _LEAST_ROUNDS or (passed_s < self._plan.seconds and rounds < _MOST_ROUNDS)
        vote = float(wanted and self._world.is_main)
        return bool(sum_across(self._world, torch.tensor([vote], device=self._wire)).item())

    def _prepared(self, name: str, size_bytes: int) -> Case:
        """Return a case after a first batch: its connections exist, and its number of messages fits its time."""
        operation = make_operation(name, size_bytes, self._world, self._wire)
        case = Case(operation, self._staged(operation))
        taken_s = self._of_all([self._batch(case)]).max().item() * operation.messages
        fewest = _FEWEST if taken_s < 5 * _BATCH_S or size_bytes <= _SMALL_BYTES else 1
        wanted = max(fewest, round(_BATCH_S / max(taken_s, 1e-9)))
        case.messages = min(wanted, _MOST, self._buffers.capacity(operation))
        return case

    def _staged(self, operation: Operation) -> RunOperation:
        """Return the operation on this device's tensors, staged through the host if the backend needs that."""
        if self._wire == self._device or not operation.on_wire:
            return operation.run
        sent, received = (
            torch.empty(count, device=self._wire) for count in (operation.sent, operation.received)
        )

        def run(device_sent: Tensor, device_received: Tensor) -> None:
            if operation.in_place:
                received.copy_(device_received)
            else:
                sent.copy_(device_sent)
            operation.run(sent, received)
            device_received.copy_(received)

        return run

    def _batch(self, case: Case) -> float:
        """Run one batch and check every result; return the seconds of one message on this rank."""
        operation, batch = case.operation, self._buffers.cut(case)
        for turn, (sent, received) in enumerate(batch, case.turn):
            sent.copy_(self._sawtooth.of(self._world.rank, turn, operation.sent))
            if operation.in_place:
                received.copy_(sent)
            else:
                received.fill_(math.nan)
        self._synchronize()
        taken_s = self._send(case, batch) if operation.takes_part else 0.0
        if operation.takes_part:
            self._check(case, [received for _, received in batch])
        case.turn += len(batch)
        return taken_s / case.messages / operation.messages

    def _send(self, case: Case, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Send all messages; return the seconds of the timed ones."""
        for sent, received in batch[:_UNTIMED]:
            case.run(sent, received)
        self._finish()
        begun = time.perf_counter()
        for sent, received in batch[_UNTIMED:]:
            case.run(sent, received)
        self._finish()
        return time.perf_counter() - begun

    def _synchronize(self) -> None:
        self._finish()
        wait_for_all(self._world)
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check(self, case: Case, results: list[Tensor]) -> None:
        """Compare every number of every result with the expected one."""
        for turn, received in enumerate(results, case.turn):
            expected = case.operation.expected(self._sawtooth, turn)
            self._checked += 1
            if not torch.equal(received, expected):
                element = int((received != expected).nonzero()[0])
                self._mistakes.append(
                    Mistake(
                        case.operation.name,
                        case.operation.size_bytes,
                        self._world.rank,
                        element,
                        expected[element].item(),
                        received[element].item(),
                    )
                )

    def _of_all(self, values: list[float]) -> Tensor:
        """Return the values of all ranks, one row per rank."""
        return all_gather_rows(
            self._world, torch.tensor(values, dtype=torch.float64, device=self._wire)
        ).cpu()

    def _measurement(self, cases: list[Case]) -> Measurement:
        """Combine the ranks: a batch takes as long as on its slowest rank."""
        slowest = [self._of_all(case.seconds).max(0).values.tolist() for case in cases]
        measured = [
            Timing(case.operation.name, case.operation.size_bytes, case.messages, seconds)
            for case, seconds in zip(cases, slowest, strict=True)
        ]
        checked, wrong = (
            self._of_all([float(self._checked), float(len(self._mistakes))]).sum(0).tolist()
        )
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        return Measurement(
            self._world.size,
            self._world.nodes,
            self._device.type,
            gpu,
            dist.get_backend(),
            torch.__version__,
            measured,
            int(checked),
            int(wrong),
            self._first_mistakes(),
        )

    def _first_mistakes(self) -> list[Mistake]:
        """Return the first mistake of every rank that has one."""
        names = list(self._plan.operations)
        row = [math.nan] * 5
        if self._mistakes:
            first = self._mistakes[0]
            row = [
                names.index(first.operation),
                first.size_bytes,
                first.element,
                first.right,
                first.found,
            ]
        return [
            Mistake(names[int(row[0])], int(row[1]), rank, int(row[2]), row[3], row[4])
            for rank, row in enumerate(self._of_all(row).tolist())
            if not math.isnan(row[0])
        ]


def main() -> None:
    """Measure as a rank that `paceline bench` has started."""
    measure(BenchPlan.from_json(sys.argv[1]))


if __name__ == "__main__":
    main()
