"""The step of `step.py` as CUDA graphs: which updates are captured, and when a captured one is compared with an eager one.

An update is recorded as two graphs: the lanes with the exchange of gradients, and the change of the weights. Both are
recorded by calling the functions of the eager step, on memory that stays where it is: batches, rows, generators. Between
the two graphs the host reads the total, so a loss that is not finite stops all ranks before the weights change. A
single rank with a small model replays both as one graph, and its host reads the total some steps later.

All ranks capture in the same step, and compare in the same steps: an exchange of gradients may be part of the graph.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.reading.nest import leaves_of, map_leaves
from paceline.errors import ConfigError, PacelineError, TrainingError
from paceline.exact.buckets import BucketedSum, LaneGradients, LaneResults
from paceline.exact.buffers import buffers_of, unfit_for_capture, write
from paceline.exact.graph_kinds import UpdateKind, UpdateKinds
from paceline.exact.lanes import LaneLosses, LaneMemory, UpdateCall
from paceline.exact.loss import Losses, refuse_no_count
from paceline.exact.optimizer import OptimizerUpdates
from paceline.exact.row import (
    LATE,
    Later,
    Layout,
    PinnedRows,
    RankRequests,
    Rows,
    StepLanes,
    StepSums,
)
from paceline.exact.step import Updates
from paceline.exact.strategy import Strategy
from paceline.world.collectives import all_gather_texts
from paceline.world.randomness import mix, seed_everything
from paceline.world.world import World

_EAGER_UPDATES = 2  # the first creates the optimizer's state, the second may compile its update
_AGREES_UNTIL = 64
_COMPARES_EVERY = 8192  # a comparison takes as long as some 40 replays of a small step
_MAX_REASON_LETTERS = 400
_FOLLOWS = (
    "The step depends on what a CUDA graph cannot follow: Python's random numbers, a counter, "
    "or a branch on the data"
)
_NOT_YET, _READY, _CAPTURED, _OBSTACLE = "not yet", "ready", "captured", "obstacle: "
"""What a rank tells the others about an update."""
_Counted = tuple[Any, ...]
"""What all ranks know of an update: they count updates alike."""


def is_agreed_on(number: int) -> bool:
    """Return whether ranks tell each other, in the update of this number of its kind, what they have captured.

    >>> [number for number in range(300) if is_agreed_on(number)] == [*range(2, 65), 128, 192, 256]
    True
    """
    return _EAGER_UPDATES <= number <= _AGREES_UNTIL or number % _AGREES_UNTIL == 0 != number


def compares(number: int) -> bool:
    """Return whether the captured update of this number is compared with an eager one: often at first, seldom later.

    >>> [number for number in range(17_000) if compares(number)]
    [2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192, 16384]
    """
    is_power = number >= _EAGER_UPDATES and not number & (number - 1)
    is_fourth = number.bit_length() % 2 == 1
    early = is_power and (number <= _AGREES_UNTIL or is_fourth)
    return (early and number < _COMPARES_EVERY) or number % _COMPARES_EVERY == 0 != number


class CapturedUpdates(Updates):
    """Updates with the bits of `Updates`. The third update of each kind is captured."""

    def _set_up(self) -> None:
        self._numbers: Counter[_Counted] = Counter()
        self._captured: dict[UpdateKind, CapturedUpdate] = {}
        self._compared_at: dict[UpdateKind, int] = {}
        """The last step of each kind in which a replay had the bits of an eager update."""
        self.pool = torch.cuda.graph_pool_handle()
        """The memory that all graphs share."""
        self._kinds = UpdateKinds([one for model in self.models for one in model.modules()])
        self._gave_up = False

    def update(self, call: UpdateCall) -> tuple[Losses, StepSums]:
        """Run an update: replayed if one like it was captured."""
        updates = self.of(call.optimizer)
        updates.follow_freezing()
        if self._gave_up:
            return super().update(call)
        kind = self._kinds.kind_of(call, updates.selections, self.buffers.columns)
        counted = self._counted(call)
        is_compared = self._agree(call, kind, self._numbers[counted])
        self._numbers[counted] += 1
        captured = self._captured.get(kind)
        if captured is None or self._gave_up:
            self._kinds.count(call, kind)
            return super().update(call)
        if is_compared:
            return self._compare(captured, call, kind)
        self.ready = time.perf_counter()
        return captured.replay(call, self._get_requests())

    def close(self) -> None:
        """Free all graphs: NCCL waits for those with collectives before it lets a rank leave."""
        for captured in self._captured.values():
            captured.close()

    def _counted(self, call: UpdateCall) -> _Counted:
        optimizer = list(self._optimizers).index(call.optimizer)
        return optimizer, call.number, call.clip_norm, call.step.plan.samples

    # What the ranks decide together

    def _agree(self, call: UpdateCall, kind: UpdateKind, number: int) -> bool:
        """Capture the update if all ranks can; return whether all have captured it, and compare it now."""
        is_alone = self.world.size == 1
        if is_alone and kind in self._captured:
            return compares(number)
        if not is_alone and not is_agreed_on(number):
            return False
        states = self._tell(self._state_of(call, kind))
        reasons = [state for state in states if state.startswith(_OBSTACLE)]
        if reasons:
            self._give_up(reasons[0].removeprefix(_OBSTACLE))
            return False
        if all(state == _READY for state in states):
            reason = next(filter(None, self._tell(self._capture(call, kind))), "")
            if reason:
                self._give_up(reason)
            return not reason
        return compares(number) and all(state == _CAPTURED for state in states)

    def _tell(self, text: str) -> list[str]:
        """Return the texts of all ranks. Every rank must call this."""
        with self.clock.waiting():
            return all_gather_texts(self.world, text)

    def _state_of(self, call: UpdateCall, kind: UpdateKind) -> str:
        if kind in self._captured:
            return _CAPTURED
        if reason := self._kinds.too_many(call):
            return f"{_OBSTACLE}{reason}"
        if self._kinds.seen(kind) < _EAGER_UPDATES:
            return _NOT_YET
        obstacle = self._obstacle(call)
        return f"{_OBSTACLE}{obstacle}" if obstacle else _READY

    def _obstacle(self, call: UpdateCall) -> str:
        """Return why this update cannot be captured, as far as that is known in advance."""
        leaves = [leaf for lane in call.step.lanes for leaf in leaves_of(lane.batch)]
        others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        is_complete = self.of(call.optimizer).sum.is_complete
        obstacles = {
            "the loss is over the whole batch, which other ranks must send first": call.over_batch,
            "with precision=fp16 the host must check every step for overflow; use precision=bf16": self.config.precision
            == "fp16",
            "some parameters got no gradient in the last step": not is_complete,
            f"the batch contains {', '.join(sorted(set(others)))}, not only tensors": others,
        }
        return next((reason for reason, is_given in obstacles.items() if is_given), "")

    def _capture(self, call: UpdateCall, kind: UpdateKind) -> str:
        """Capture an update; return why that is impossible, or ""."""
        try:
            self._captured[kind] = CapturedUpdate(self, self.of(call.optimizer), call)
        except Exception as error:  # noqa: BLE001 - CUDA and user code raise anything
            text = error.problem if isinstance(error, PacelineError) else str(error)
            return " ".join(text.split())[:_MAX_REASON_LETTERS]
        return ""

    def _compare(
        self, captured: CapturedUpdate, call: UpdateCall, kind: UpdateKind
    ) -> tuple[Losses, StepSums]:
        """Run an update both ways. If they differ on a rank, all give up, and this update is eager."""
        requests = self._get_requests()
        if reason := self._difference(captured.difference(call, requests), call):
            self._end_capturing(kind, call, reason)
            return super().update(call)
        self.ready = time.perf_counter()
        found, text = captured.finish_compared(call, requests)
        if reason := self._difference(text, call):
            self._end_capturing(kind, call, reason)
        self._compared_at[kind] = call.step.plan.index + 1
        return found

    def _difference(self, text: str, call: UpdateCall) -> str:
        """Return the first difference that a rank has found; "" if none has. Every rank must call this."""
        for rank, found in enumerate(self._tell(text)):
            if found:
                step = call.step.plan.index + 1
                return (
                    f"the replayed step {step} differs from the eager one on rank {rank}: {found}"
                )
        return ""

    def _end_capturing(self, kind: UpdateKind, call: UpdateCall, reason: str) -> None:
        """Stop capturing. An exact run fails if earlier replays were not compared: its weights may be wrong."""
        since, reason = self._compared_at.get(kind), f"{reason}. {_FOLLOWS}"
        if since is not None and self.config.exact:
            raise TrainingError(
                f"{reason}. Replayed steps after step {since} were not compared, and may be wrong, too",
                fix=f"remove the checkpoints after step {since}, and resume with capture=false",
            )
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self.config.capture == "true":
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {reason}",
                fix="remove that obstacle, or set capture=auto to train without CUDA graphs",
            )
        self._gave_up = True
        self.close()
        self._captured.clear()
        _print_reason(self.world, reason)


def _not_capturable(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return why optimizers cannot be captured; empty if they can."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" not in group and not group.get("fused"):
                name = type(optimizer).__name__
                return f"{name} has no option capturable; use AdamW, or SGD with fused=True"
    return ""


def may_capture(
    world: World,
    config: RunConfig,
    strategy: Strategy,
    optimizers: Sequence[torch.optim.Optimizer],
) -> bool:
    """Return whether to try to capture updates; raise if capture=true is impossible, say why capture=auto is."""
    if config.capture == "true" and world.device == "cpu":
        raise ConfigError(
            "capture=true needs a GPU, but this run trains on cpu", fix="set capture=auto"
        )
    if not strategy.captures:
        return False
    reason = strategy.capture_obstacle or _not_capturable(optimizers)
    if reason and config.capture == "true":
        raise ConfigError(
            f"the step cannot be captured as a CUDA graph: {reason}",
            fix="use another optimizer, or set capture=auto",
        )
    if reason:
        _print_reason(world, reason)
    return not reason


def _print_reason(world: World, reason: str) -> None:
    if world.is_main:
        print(f"training without CUDA graphs: {reason}", file=sys.stderr, flush=True)


class CannotCapture(Exception):
    """Why an update cannot be captured as a CUDA graph."""


_SMALL_BYTES = 64 << 20
"""Bytes of all gradients of a model whose update is also recorded as one graph, which needs their memory twice."""


class CapturedRows(Rows):
    """Rows that a graph writes. What the host knows as a number is written once, and must stay the same."""

    def __init__(self, layout: Layout, lanes: int, device: torch.device) -> None:
        super().__init__(layout, lanes, device)
        self._numbers: dict[tuple[int, int], float] = {}
        """The counts that the loss gave as Python numbers, by row and column."""
        self._has_requests = False

    def _put(self, place: Tensor, value: Tensor | float) -> None:
        if not isinstance(value, Tensor):
            raise CannotCapture("a value of the loss is a Python number, not a tensor")
        if value.device != place.device:
            raise CannotCapture(f"a value of the loss is on {value.device}")
        super()._put(place, value)

    def _put_count(self, row: int, column: int, count: float) -> None:
        before = self._numbers.setdefault((row, column), count)
        if count != before:
            raise CannotCapture(
                f"the count of {self.layout.names[column]!r} is {count:g}, and was {before:g} before; return it as a tensor"
            )
        if not torch.cuda.is_current_stream_capturing():
            super()._put_count(row, column, count)

    def renew_requests(self, requests: RankRequests) -> None:
        """Let the last row carry the requests of this rank instead of earlier ones."""
        if self._has_requests:
            self.clear()
        self._has_requests = any(requests)
        self.set_requests(requests)


class CapturedMemory(LaneMemory):
    """What the lanes of a captured update read and write: it stays where it is from one replay to the next."""

    is_recorded = True

    def __init__(self, call: UpdateCall, seed: int, device: torch.device) -> None:
        self._call, self._seed, self._device = call, seed, device
        self.batches = [map_leaves(Tensor.clone, lane.batch) for lane in call.step.lanes]
        self._leaves: list[Tensor] = [leaf for batch in self.batches for leaf in leaves_of(batch)]
        self._generators = [torch.Generator(device) for _ in call.step.lanes]
        self._default = torch.cuda.default_generators[device.index or 0]
        self._rows: CapturedRows | None = None
        self.is_recording = self.sends = False

    def rows(self, layout: Layout) -> Rows:
        """Return the rows; they are made once it is known what the loss returns."""
        if self._rows is None:
            self._rows = CapturedRows(layout, len(self.batches), self._device)
        if layout != self._rows.layout:
            raise CannotCapture("the loss returned other values than before")
        return self._rows

    def fill(self, call: UpdateCall) -> None:
        """Copy the batches of a step, and seed the generators."""
        self._call = call
        given = [leaf for lane in call.step.lanes for leaf in leaves_of(lane.batch)]
        for place, leaf in zip(self._leaves, given, strict=True):
            place.copy_(leaf, non_blocking=True)
        for lane, generator in zip(call.step.lanes, self._generators, strict=True):
            generator.manual_seed(mix(*call.seeds_of(self._seed, lane.number)))

    def batch(self, row: int) -> Any:
        """Draw from the generator of the lane in this row from now on; return its batch."""
        if self.is_recording:
            self._default.graphsafe_set_state(self._generators[row])
        else:
            seed_everything(*self._call.seeds_of(self._seed, self._call.step.lanes[row].number))
        return self.batches[row]

    @contextlib.contextmanager
    def recorded_by(self, graph: torch.cuda.CUDAGraph, *, sends: bool) -> Iterator[None]:
        """Let a graph record lanes on this memory, which draw from the generators of the lanes."""
        state = self._default.graphsafe_get_state()
        for generator in self._generators:
            graph.register_generator_state(generator)
        self.is_recording, self.sends = True, sends
        try:
            yield
        finally:
            self.is_recording = self.sends = False
            self._default.graphsafe_set_state(state)


class CapturedBuffers:
    """The memory of the buffers that a graph reads and writes. Forward may assign other tensors."""

    def __init__(self, engine: CapturedUpdates) -> None:
        self._moving = engine.buffers
        self._groups = list(self._moving.groups)  # a graph reads their memory
        self._own = [buffer for group in self._groups for buffer in group.buffers]
        if not self._moving.every:  # a single lane changes the buffers itself
            self._own = list(buffers_of(engine.models))
        self._memory = [buffer.original for buffer in self._own]
        if reason := unfit_for_capture(
            {
                each.name: each.original
                for group in self._groups
                if group.adds_changes
                for each in group.buffers
            }
        ):
            raise CannotCapture(reason)

    def begin(self) -> None:
        """Remember the buffers at the start of the update."""
        for group in self._groups:
            group.begin()

    def collect(self) -> None:
        """Copy buffers that were assigned into the memory that a replay reads."""
        for buffer, memory in zip(self._own, self._memory, strict=True):
            now = buffer.now()
            if now is not memory:
                buffer.original = memory
                write([buffer], [now.detach()])

    def refuse_unknown(self) -> None:
        """Raise if forward wrote to a buffer whose value has not changed so far: rows have no columns for it."""
        for buffer in self._moving.unknown:
            if buffer.is_written:
                raise CannotCapture(
                    f"forward writes to the buffer {buffer.name}, whose value did not change before"
                )

    def forget(self) -> None:
        """Note that a replay has written the buffers."""
        for buffer in self._own:
            buffer.forget()


class _Whole(NamedTuple):
    """A whole update of a single rank in one graph."""

    graph: torch.cuda.CUDAGraph
    head: Tensor
    gradients: LaneGradients


class CapturedUpdate:
    """The graphs of an update, with the memory that they read and write; replays them for the batches of other steps."""

    def __init__(
        self, engine: CapturedUpdates, updates: OptimizerUpdates, call: UpdateCall
    ) -> None:
        self._engine, self._updates = engine, updates
        self._world, self._config = engine.world, engine.config
        assert isinstance(updates.sum, BucketedSum)
        self._sum = updates.sum
        self._exchanges = self._world.size > 1 and self._sum.can_capture_exchange
        self._memory = CapturedMemory(call, self._config.seed, torch.device(self._world.device))
        self._buffers = CapturedBuffers(engine)
        self._warm_up(call)
        self._pinned = PinnedRows(len(call.step.lanes) + 1, self._rows.layout.head)
        self._record_lanes(call)
        self._record_change(call)
        self._whole = self._record_whole(call)

    def _warm_up(self, call: UpdateCall) -> None:
        """Run the lanes once: compilation and set-up must not be part of the graph, and rows get their layout."""
        self._memory.fill(call)
        self._engine.buffers.begin()
        with restored(self._engine.models):
            self._rows = self._compute(call)
            self._buffers.refuse_unknown()
        self._engine.buffers.begin()
        self._engine.prepare_finish(call, self._rows)

    def _compute(self, call: UpdateCall) -> Rows:
        """Run all lanes of this rank as an eager update does, on the memory of the graph."""
        self._buffers.begin()
        rows = self._engine.run_captured_lanes(LaneLosses(self._updates, call, None), self._memory)
        if self._world.size == 1 and self._config.batch.lanes == 1:
            self._buffers.collect()
        return rows

    def _record_lanes(self, call: UpdateCall) -> None:
        self._lanes = torch.cuda.CUDAGraph()
        with (
            self._memory.recorded_by(self._lanes, sends=self._exchanges),
            self._capturing(self._lanes),
        ):
            self._compute(call)
            self._results = self._sum.lane_results()
            if self._world.size == 1 or self._exchanges:
                self._total = self._sum.finish(self._results)
            if self._world.size == 1:
                self._head = self._head_of(self._total)
        if not self._sum.lanes_are_complete:
            raise CannotCapture("some parameters got no gradient in this step")
        if self._world.size > 1 and not self._exchanges:
            self._total = torch.zeros_like(self._rows.numbers[0])
            self._sum.place_totals()
        self._gradients = [value.grad for value in self._updates.parameters]

    def _head_of(self, total: Tensor) -> Tensor:
        """Return what the host reads, in one piece: the total, then the rows."""
        both = torch.cat([total[None], self._rows.numbers])
        return both[:, : self._rows.layout.head].contiguous()

    def _record_change(self, call: UpdateCall) -> None:
        self._change = torch.cuda.CUDAGraph()
        with self._capturing(self._change):
            self._apply(call, self._total)

    def _record_whole(self, call: UpdateCall) -> _Whole | None:
        """Record both parts as one graph if the model is small: a second launch would cost some percent of its step."""
        size = sum(value.nbytes for value in self._gradients if value is not None)
        if self._world.size > 1 or size > _SMALL_BYTES:
            return None
        graph = torch.cuda.CUDAGraph()
        with self._memory.recorded_by(graph, sends=False), self._capturing(graph):
            self._compute(call)
            total = self._sum.finish()
            head = self._head_of(total)
            gradients = [value.grad for value in self._updates.parameters]
            self._apply(call, total)
        return _Whole(graph, head, gradients)

    def _apply(self, call: UpdateCall, total: Tensor) -> None:
        """Change buffers and weights by the sums over all ranks."""
        self._engine.finish_gradients(self._updates, call, self._rows, total)
        self._updates.apply(call.clip_norm)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Any:
        torch.cuda.synchronize()
        return torch.cuda.graph(graph, pool=self._engine.pool, capture_error_mode="thread_local")

    def close(self) -> None:
        """Free the graphs."""
        torch.cuda.synchronize()
        for graph in (self._lanes, self._change, *(self._whole or ())[:1]):
            graph.reset()

    # Replaying

    def _fill(self, call: UpdateCall, requests: RankRequests) -> None:
        """Copy batch, seeds and requests to where a replay reads them."""
        self._memory.fill(call)
        self._buffers.collect()
        if self._world.size > 1:
            assert isinstance(self._rows, CapturedRows)
            self._rows.renew_requests(requests)

    def replay(self, call: UpdateCall, requests: RankRequests) -> tuple[Losses, StepSums]:
        """Run the update; return mean losses and sums."""
        self._fill(call, requests)
        if self._whole is None:
            self._lanes.replay()
            return self._finish(call, requests, self._change.replay)
        self._whole.graph.replay()
        return self._leave(call, requests, self._whole.head, self._whole.gradients)

    def _finish(
        self, call: UpdateCall, requests: RankRequests, change: Callable[[], object]
    ) -> tuple[Losses, StepSums]:
        """Change the weights after the lanes were replayed; return mean losses and sums."""
        if self._world.size == 1:
            change()
            return self._leave(call, requests, self._head, self._gradients)
        if self._exchanges:
            self._sum.use_totals()
        else:
            self._total.copy_(self._sum.send_results(self._results, self._rows))
        numbers = self._engine.read(call, self._rows, self._total)
        change()
        self._engine.apply_new_buffers(call, self._rows, numbers)
        self._show(self._gradients)
        return self._rows.losses(numbers), self._rows.step_sums(numbers)

    def _leave(
        self, call: UpdateCall, requests: RankRequests, head: Tensor, gradients: LaneGradients
    ) -> tuple[Losses, StepSums]:
        """End an update of a single rank, whose host does not wait for the loss."""
        self._show(gradients)
        layout, lanes = self._rows.layout, StepLanes.of(call.step, self._world.rank)

        def check(rows: list[list[float]]) -> None:
            total, *of_lanes = rows
            if found := lanes.not_finite([row[0] for row in of_lanes]):
                raise lanes.error(found, LATE)
            if layout.by_count:
                refuse_no_count(total[layout.counts], lanes.step)
            if total[layout.buffer]:
                raise self._engine.buffers.too_large()

        numbers = self._pinned.copy(head, check)
        sums: dict[str, Later] = {}
        counts: dict[str, Later | float] = {}
        for column, (name, is_counted) in enumerate(zip(layout.names, layout.counted, strict=True)):
            sums[name] = Later(numbers, column)
            counted = Later(numbers, layout.counts + column)
            counts[name] = counted if is_counted else float(lanes.samples)
        save, stop = float(requests.save), float(requests.stop)
        return Losses(sums, counts), StepSums(sums["loss"], counts["loss"], save, stop)

    def _show(self, gradients: LaneGradients) -> None:
        """Let the user's code find what a replay has written."""
        self._buffers.forget()
        for parameter, gradient in zip(self._updates.parameters, gradients, strict=True):
            if parameter.grad is not gradient:  # setting it takes longer
                parameter.grad = gradient

    # Comparing

    def difference(self, call: UpdateCall, requests: RankRequests) -> str:
        """Replay the lanes, and compare them with eager ones; return how they differ, "" if they do not."""
        models = self._engine.models
        self._fill(call, requests)
        before, wanted, text = values_of(models), None, ""
        self._before = before
        try:
            with restored(models):
                rows = self._compute(call).numbers.clone()
                wanted = Outcome(rows, self._lane_gradients(), values_of(models))
        except CannotCapture as reason:
            text = str(reason)
        self._lanes.replay()  # in any case: other ranks wait for its collectives
        if wanted is not None:
            is_alone = self._world.size == 1
            gradients = self._gradients if is_alone else flat(self._results)
            found = Outcome(self._rows.numbers, gradients, values_of(models))
            lanes = [lane.number for lane in call.step.lanes]
            text = found.difference_from(wanted, lanes, exact=self._config.exact)
        if text:
            restore(models, before)
        return text

    def finish_compared(
        self, call: UpdateCall, requests: RankRequests
    ) -> tuple[tuple[Losses, StepSums], str]:
        """End an update after `difference`: the weights change eagerly, and by replays; return how these differ."""
        texts: list[str] = []
        found = self._finish(
            call, requests, lambda: texts.append(self._change_difference(call, requests))
        )
        return found, texts[0]

    def _change_difference(self, call: UpdateCall, requests: RankRequests) -> str:
        optimizer, models = call.optimizer, self._engine.models
        state = ChangedState(models, optimizer, self._gradients)
        if not (self._config.exact and can_repeat(optimizer) and state.has_room):
            self._change.replay()
            return ""
        self._show(self._gradients)

        def eager() -> None:
            self._apply(call, self._total)

        def whole() -> None:
            restore(models, self._before)  # a single lane has changed them
            self._fill(call, requests)
            assert self._whole
            self._whole.graph.replay()

        replays: dict[str, Callable[[], object]] = {"the replay": self._change.replay}
        if self._whole is not None:
            replays["the replay as one graph"] = whole
        return state.difference(eager, replays)

    def _lane_gradients(self) -> LaneGradients:
        """Return the gradients of eager lanes, as far as a replay leaves them in its memory."""
        if self._world.size > 1:
            return flat(self._sum.lane_results())
        self._sum.finish()
        return [value.grad for value in self._updates.parameters]


_FREE = 1e-2
"""Relative difference of losses that kernels without a fixed order may cause."""


class Outcome(NamedTuple):
    """Notes, gradients and buffers after the lanes of an update."""

    rows: Tensor
    gradients: LaneGradients
    buffers: list[Tensor]

    def difference_from(self, eager: Outcome, lanes: list[int], *, exact: bool) -> str:
        """Return how a replay differs from an eager run: in any bit if `exact`, otherwise in a loss; "" if it does not.

        >>> eager = Outcome(torch.tensor([[2.0, 4.0]]), [torch.ones(3)], [])
        >>> eager._replace(rows=torch.tensor([[2.5, 4.0]])).difference_from(eager, [3], exact=True)
        'the sum of the losses of lane 3 is 2.5, not 2'
        >>> eager._replace(gradients=[torch.zeros(3)]).difference_from(eager, [3], exact=True)
        'a gradient has other bits'
        """
        pairs = zip(lanes, self.rows[:, 0].tolist(), eager.rows[:, 0].tolist(), strict=True)
        for lane, now, wanted in pairs:
            is_near = math.isclose(now, wanted, rel_tol=0.0 if exact else _FREE)
            if math.isfinite(wanted) and not is_near:
                return f"the sum of the losses of lane {lane} is {now:.8g}, not {wanted:.8g}"
        if not exact or not eager.rows[:, 0].isfinite().all():
            return ""
        if not _equal(self.rows, eager.rows):
            return "a value of the loss, or a buffer, has other bits"
        if not same(self.gradients, eager.gradients):
            return "a gradient has other bits"
        return "" if same(self.buffers, eager.buffers) else "a buffer has other bits"


def same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether tensors are equal, each of one list to that of the other."""
    pairs = zip(some, others, strict=True)
    return all(a is not None and b is not None and _equal(a, b) for a, b in pairs)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal numbers; nan equals nan."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def flat(results: LaneResults) -> LaneGradients:
    """Return the gradients of all lanes and subtrees."""
    return [*results.newest, *(value for subtree in results.sums for value in subtree)]


def values_of(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return copies of all buffers."""
    return [buffer.clone() for model in models for buffer in model.buffers()]


def restore(models: Sequence[nn.Module], values: list[Tensor]) -> None:
    """Give all buffers the values that `values_of` returned."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


@contextlib.contextmanager
def restored(models: Sequence[nn.Module]) -> Iterator[None]:
    """Give all buffers the values that they had before."""
    before = values_of(models)
    try:
        yield
    finally:
        restore(models, before)


_COPIES = 2.5
"""Room that a comparison needs: two copies of what changes, and the work of the optimizer."""


class ChangedState:
    """All that a change of the weights may write: weights, buffers, the optimizer's state, gradients."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        gradients: LaneGradients,
    ) -> None:
        # Options, such as a rate that lies on the GPU, are read only: a write would look like one by the script.
        every = [*optimizer.state.values(), *(group["params"] for group in optimizer.param_groups)]
        for model in models:
            every += [*model.parameters(), *model.buffers()]
        tensors = [leaf for leaf in leaves_of(every) if isinstance(leaf, Tensor)]
        self._compared = list({id(value): value for value in tensors}.values())
        # Clipping changes gradients, too; a replay of the whole update has its own.
        self._others = [value for value in gradients if value is not None]

    @property
    def has_room(self) -> bool:
        """Whether the GPU can hold the copies."""
        size = sum(value.nbytes for value in (*self._compared, *self._others))
        free = torch.cuda.mem_get_info()[0]
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + unused > _COPIES * size

    def difference(
        self, eager: Callable[[], object], replays: Mapping[str, Callable[[], object]]
    ) -> str:
        """Make an eager change, and each replay from the same start; keep the eager result.

        Return which replay gave other bits; "" if none did.
        """
        every = [*self._compared, *self._others]
        with torch.no_grad():
            start = [value.clone() for value in every]
            eager()
            wanted = [value.clone() for value in every]
            text = ""
            for name, replay in replays.items():
                _write(every, start)
                replay()
                if not same(self._compared, wanted[: len(self._compared)]):
                    text = f"{name} has changed weights, buffers or the optimizer's state to other bits"
            _write(every, wanted)
        return text


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def can_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step can be undone and made again: its state is known, and no hook does more.

    >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    >>> can_repeat(sgd)
    True
    >>> hook = sgd.register_step_post_hook(lambda *_: None)
    >>> can_repeat(sgd)
    False
    """
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    has_hooks = any(getattr(optimizer, name, None) for name in hooks)
    return type(optimizer).__module__.startswith(("torch.", "paceline.")) and not has_hooks
