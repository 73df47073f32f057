"""How the ranks of a world measure their collectives, and see that every result is right.

A batch is a few messages back to back, each in memory of its own, so that every result can be looked at afterwards.
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
_OPENING = 1  # message before the clock starts: it waits for word that it is expected, and meets idle queues and full buckets
_FEWEST, _MOST = 4, 64  # messages of a batch, where time and memory allow
_SMALL_BYTES = (
    1 << 16
)  # below this latency is what is measured, and that ranks do not begin at one moment must not show
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50
_LANES = 1 << 20  # more than there will be ranks
_MEETS_WITHIN_S = 600.0
_ANSWERS_WITHIN_S = 300.0


def measure(plan: BenchPlan) -> Measurement:
    """Join the world that is there, measure, and return what all ranks found; only rank 0 writes it."""
    config = RunConfig(
        name="bench",
        device=plan.device,  # type: ignore[arg-type]
        backend=plan.backend,  # type: ignore[arg-type]
        exact=False,
        batch=BatchConfig(_LANES, _LANES),
        timeout=TimeoutConfig(_MEETS_WITHIN_S, _ANSWERS_WITHIN_S),
    )
    with join(config) as world, _group_of_one(world, config):
        found = Bench(plan, world).run()
        if plan.to and world.is_main:
            write_whole(Path(plan.to), found.as_json().encode())
    return found


@contextmanager
def _group_of_one(world: World, config: RunConfig) -> Iterator[None]:
    """Give a rank that is alone a group, too: its backend is measured all the same."""
    if world.size == 1:
        keep_to_loopback()
        store = HashStore()
        dist.init_process_group(
            choose_backend(world, config, store), store=store, rank=0, world_size=1
        )
    yield


@dataclass(eq=False)
class Case:
    """One operation at one size, and how long its batches took."""

    operation: Operation
    run: RunOperation
    messages: int = 1
    seconds: list[float] = field(default_factory=list)
    turn: int = 0


class Buffers:
    """The memory of a batch, the same for all cases."""

    def __init__(self, largest: int, device: torch.device) -> None:
        self._numbers = max((1 + _OPENING) * largest, _BATCH_BYTES // ELEMENT_BYTES)
        self._sent, self._received = (torch.empty(self._numbers, device=device) for _ in range(2))

    def most(self, operation: Operation) -> int:
        """Return for how many messages there is room, besides the opening."""
        return max(1, self._numbers // max(operation.sent, operation.received) - _OPENING)

    def cut(self, case: Case) -> list[tuple[Tensor, Tensor]]:
        """Return the memory of each message: what is sent, and what is received."""
        operation, count = case.operation, case.messages + _OPENING

        def pieces(room: Tensor, numbers: int) -> Iterable[Tensor]:
            return room[: numbers * count].view(count, numbers)

        return list(
            zip(
                pieces(self._sent, operation.sent),
                pieces(self._received, operation.received),
                strict=True,
            )
        )


class Bench:
    """Measures all operations at all sizes in rounds, so that a busy moment falls on all alike."""

    def __init__(self, plan: BenchPlan, world: World) -> None:
        if world.size > MOST_RANKS:
            raise EnvironmentUnfit(
                f"of {world.size:,} ranks no sum could be checked",
                fix=f"measure at most {MOST_RANKS:,} of them",
            )
        self._plan, self._world = plan, world
        self._device, self._wire = torch.device(world.device), wire_device(world)
        self._checked, self._mistakes = 0, list[Mistake]()
        largest = max(plan.sizes_bytes) // ELEMENT_BYTES + world.size
        try:
            self._saw, self._room = (
                Sawtooth(largest, world.size, self._device),
                Buffers(largest, self._device),
            )
        except (RuntimeError, MemoryError) as error:
            raise EnvironmentUnfit(
                f"no memory for messages of {max(plan.sizes_bytes):,} bytes on rank {world.rank}",
                fix="give smaller --sizes: each rank needs five times the largest",
            ) from error

    def run(self) -> Measurement:
        """Measure until the time is over, three rounds at least."""
        names = [name for name in self._plan.operations if name != "pair" or self._world.size > 1]
        cases = [self._prepared(name, size) for name in names for size in self._plan.sizes_bytes]
        rounds, begun = 0, time.perf_counter()
        while self._goes_on(rounds, time.perf_counter() - begun):
            for case in cases:
                case.seconds.append(self._batch(case))
            rounds += 1
        return self._found(cases)

    def _goes_on(self, rounds: int, passed_s: float) -> bool:
        """Return whether there is another round: rank 0 looks at the clock for all."""
        wants = rounds < _LEAST_ROUNDS or (passed_s < self._plan.seconds and rounds < _MOST_ROUNDS)
        mine = float(wants and self._world.is_main)
        return bool(sum_across(self._world, torch.tensor([mine], device=self._wire)).item())

    def _prepared(self, name: str, size_bytes: int) -> Case:
        """Return a case that has run: connections are there, and how long it takes is known."""
        operation = make_operation(name, size_bytes, self._world, self._wire)
        case = Case(operation, self._staged(operation))
        taken_s = self._of_all([self._batch(case)]).max().item() * operation.messages
        fewest = _FEWEST if taken_s < 5 * _BATCH_S or size_bytes <= _SMALL_BYTES else 1
        wanted = max(fewest, round(_BATCH_S / max(taken_s, 1e-9)))
        case.messages = min(wanted, _MOST, self._room.most(operation))
        return case

    def _staged(self, operation: Operation) -> RunOperation:
        """Return the operation for memory of this rank's device, through the host where the backend wants that."""
        if self._wire == self._device or not operation.on_wire:
            return operation.run
        sent, received = (
            torch.empty(count, device=self._wire) for count in (operation.sent, operation.received)
        )

        def run(mine: Tensor, theirs: Tensor) -> None:
            (received if operation.in_place else sent).copy_(theirs if operation.in_place else mine)
            operation.run(sent, received)
            theirs.copy_(received)

        return run

    def _batch(self, case: Case) -> float:
        """Send one batch; return the seconds of one message on this rank, and look at every result."""
        operation, batch = case.operation, self._room.cut(case)
        for turn, (sent, received) in enumerate(batch, case.turn):
            sent.copy_(self._saw.of(self._world.rank, turn, operation.sent))
            if operation.in_place:
                received.copy_(sent)
            else:
                received.fill_(math.nan)
        self._meet()
        taken_s = self._send(case, batch) if operation.takes_part else 0.0
        if operation.takes_part:
            self._check(case, [received for _, received in batch])
        case.turn += len(batch)
        return taken_s / case.messages / operation.messages

    def _send(self, case: Case, batch: list[tuple[Tensor, Tensor]]) -> float:
        """Send all messages; return how long those after the opening took."""
        for sent, received in batch[:_OPENING]:
            case.run(sent, received)
        self._finish()
        begun = time.perf_counter()
        for sent, received in batch[_OPENING:]:
            case.run(sent, received)
        self._finish()
        return time.perf_counter() - begun

    def _meet(self) -> None:
        self._finish()
        wait_for_all(self._world)
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check(self, case: Case, results: list[Tensor]) -> None:
        """Compare every number of every result with what it must be."""
        for turn, received in enumerate(results, case.turn):
            right = case.operation.right(self._saw, turn)
            self._checked += 1
            if not torch.equal(received, right):
                element = int((received != right).nonzero()[0])
                self._mistakes.append(
                    Mistake(
                        case.operation.name,
                        case.operation.size_bytes,
                        self._world.rank,
                        element,
                        right[element].item(),
                        received[element].item(),
                    )
                )

    def _of_all(self, values: list[float]) -> Tensor:
        """Return the numbers of all ranks, a row each."""
        return all_gather_rows(
            self._world, torch.tensor(values, dtype=torch.float64, device=self._wire)
        ).cpu()

    def _found(self, cases: list[Case]) -> Measurement:
        """Put together what all ranks know: the time of a batch is that of its slowest rank."""
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
        """Return the first mistake of every rank that met one."""
        names = list(self._plan.operations)
        mine = [math.nan] * 5
        if self._mistakes:
            first = self._mistakes[0]
            mine = [
                names.index(first.operation),
                first.size_bytes,
                first.element,
                first.right,
                first.found,
            ]
        return [
            Mistake(names[int(row[0])], int(row[1]), rank, int(row[2]), row[3], row[4])
            for rank, row in enumerate(self._of_all(mine).tolist())
            if not math.isnan(row[0])
        ]


def main() -> None:
    """Measure as one of the ranks that `paceline bench` has started."""
    measure(BenchPlan.from_json(sys.argv[1]))


if __name__ == "__main__":
    main()
