"""Matrix products by the fastest algorithm of cuBLASLt that has the bits of its favourite.

The first product of a kind tries all proposals: those with other bits are left out, the others are timed. So timing
decides the speed, never the result, and ranks may choose differently. Bits are compared on random numbers and on sums that
cancel, whose results are nothing but rounding errors. Choices are kept with compiled code (`world/compile_cache`): the next
start tries nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.cublaslt import (
    ALIGNMENT,
    Algorithm,
    Epilogue,
    Operands,
    Plan,
    Problem,
    version,
)
from paceline.rundir import write_whole

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_FILE = "products.json"
_TRIAL_ROWS, _ROUNDS, _REPEATS = 1024, 5, 3
_TRIAL = 2  # counts changes of the comparison: choices of an earlier one are not kept
_chosen: dict[tuple[int, Problem], tuple[Plan, Algorithm] | None] = {}
_lock = threading.Lock()  # a plan points to the operands of one product at a time


def multiply(
    inputs: Tensor,
    weight: Tensor,
    *,
    transposed: bool,
    epilogue: Epilogue = Epilogue.NONE,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
) -> Tensor | None:
    """Return inputs [rows, inner] times a weight; None if cuBLASLt cannot compute it.

    `aux` must be `aligned`; new memory is.
    """
    if not inputs.is_cuda or not version():
        return None
    inner, outputs = reversed(weight.shape) if transposed else weight.shape
    problem = Problem(inputs.shape[0], outputs, inner, transposed, epilogue)
    if not fits(problem, inputs, weight, bias, aux):
        return None  # torch says what is wrong
    inputs, weight, bias = aligned(inputs), aligned(weight), None if bias is None else aligned(bias)
    operands = Operands(inputs, weight, inputs.new_empty(problem.rows, outputs), bias, aux)
    with _lock, torch.cuda.device(inputs.device):
        found = _find(problem, operands)
        if found is None:
            return None
        plan, algorithm = found
        plan.run(algorithm, operands)
    return operands.result


def fits(
    problem: Problem, inputs: Tensor, weight: Tensor, bias: Tensor | None, aux: Tensor | None
) -> bool:
    """Return whether the operands have the sizes of a product, and are in bf16 on one device."""
    given = [one for one in (inputs, weight, bias, aux) if one is not None]
    return (
        inputs.shape[1] == problem.inner
        and (bias is None or bias.shape == (problem.outputs,))
        and (aux is None or aux.shape == (problem.rows, problem.outputs))
        and all(one.device == inputs.device and one.dtype == torch.bfloat16 for one in given)
    )


def aligned(values: Tensor) -> Tensor:
    """Return a contiguous tensor at an address that cuBLASLt expects."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % ALIGNMENT else values


def _find(problem: Problem, operands: Operands) -> tuple[Plan, Algorithm] | None:
    """Return how to compute a product; None if cuBLASLt proposes nothing."""
    device = operands.inputs.get_device()
    if (device, problem) in _chosen:
        return _chosen[device, problem]
    plan = Plan(problem, device)
    algorithms = plan.algorithms(operands)
    if not algorithms:
        _chosen[device, problem] = None
        return None
    kept = kept_choice(problem)
    known = next((one for one in algorithms if one.settings == kept), None)
    if known is None and torch.cuda.is_current_stream_capturing():
        return plan, algorithms[0]  # no time can be taken in a CUDA graph
    if known is None:
        try:
            known = _tuned(plan, problem, algorithms, operands)
            keep_choice(problem, known.settings)
        except (
            RuntimeError
        ):  # no memory for the trial, or too small a one: the product itself can be computed
            known = algorithms[0]
    _chosen[device, problem] = plan, known
    return plan, known


def _tuned(
    plan: Plan, problem: Problem, algorithms: Sequence[Algorithm], operands: Operands
) -> Algorithm:
    """Return the fastest algorithm among those with the bits of the first."""
    smaller = problem._replace(rows=min(problem.rows, _TRIAL_ROWS))
    trial = Plan(smaller, operands.inputs.get_device())

    def result_of(algorithm: Algorithm) -> list[Tensor]:
        results = []
        for tried in trials(smaller, operands):
            trial.run(algorithm, tried)
            results += [one for one in (tried.result, tried.aux) if one is not None]
        return results

    def seconds_of(algorithm: Algorithm) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        plan.run(algorithm, operands)
        begin.record()
        for _ in range(_REPEATS):
            plan.run(algorithm, operands)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return fastest(with_bits_of_first(algorithms, result_of), seconds_of)


def with_bits_of_first(
    algorithms: Sequence[Algorithm], result_of: Callable[[Algorithm], list[Tensor]]
) -> list[Algorithm]:
    """Return the first algorithm, and those that compute the same bits."""
    wanted, same = result_of(algorithms[0]), [algorithms[0]]
    for algorithm in algorithms[1:]:
        with contextlib.suppress(RuntimeError):  # it does not fit the trial
            found = result_of(algorithm)
            if all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True)):
                same.append(algorithm)
    return same


def fastest(algorithms: Sequence[Algorithm], seconds_of: Callable[[Algorithm], float]) -> Algorithm:
    """Return the algorithm with the least median time; they take turns, because a GPU slows down while it works."""
    if len(algorithms) == 1:
        return algorithms[0]
    rounds = [[seconds_of(algorithm) for algorithm in algorithms] for _ in range(_ROUNDS)]
    times = [median(times) for times in zip(*rounds, strict=True)]
    return algorithms[times.index(min(times))]


def trials(problem: Problem, operands: Operands) -> list[Operands]:
    """Return operands to compare algorithms with, the same in every call.

    Few of the random products show in bf16 that they were added up in another order. Those of the second trial are zero but
    for rounding errors, so most do.
    """
    generator = torch.Generator(operands.inputs.device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return operands.inputs.new_empty(size).normal_(generator=generator)

    weight = drawn(*operands.weight.shape) / problem.inner**0.5
    bias = None if operands.bias is None else drawn(problem.outputs)
    aux = None if operands.aux is None else drawn(problem.rows, problem.outputs)
    inputs = drawn(problem.rows, problem.inner)
    result = inputs.new_empty(problem.rows, problem.outputs)
    random = Operands(inputs, weight, result, bias, aux)
    return [random, _cancelling(random, 1 if problem.transposed else 0, generator)]


def _cancelling(random: Operands, dim: int, generator: torch.Generator) -> Operands:
    """Return operands whose products are zero: the second half of each sum is the first one, shuffled and negative."""
    half = random.inputs.shape[1] // 2
    order = torch.randperm(half, generator=generator, device=random.inputs.device)
    inputs, weight = random.inputs[:, :half], random.weight.narrow(dim, 0, half)
    return Operands(
        torch.cat([inputs, inputs[:, order]], 1),
        torch.cat([weight, -weight.index_select(dim, order)], dim),
        torch.empty_like(random.result),
        None if random.bias is None else torch.zeros_like(random.bias),
        None if random.aux is None else random.aux.clone(),
    )


# Choices that are kept


def kept_choice(problem: Problem) -> tuple[int, ...] | None:
    """Return the settings of the algorithm that was chosen in an earlier start; None if none was."""
    found = _read().get(_name(problem))
    return tuple(found) if isinstance(found, list) else None


def keep_choice(problem: Problem, settings: tuple[int, ...]) -> None:
    """Keep a choice for the next start, if there is a folder for compiled code."""
    folder = os.environ.get(_FOLDER)
    if not folder:
        return
    with contextlib.suppress(OSError):  # a full disk, for example: the next start chooses again
        choices = _read() | {_name(problem): list(settings)}
        write_whole(Path(folder) / _FILE, json.dumps(choices).encode(), durable=False)


def _name(problem: Problem) -> str:
    """Return what a choice depends on: the folder may be one that the user shares between cards."""
    order = "outputs x inner" if problem.transposed else "inner x outputs"
    sizes = f"{problem.rows} rows, weight {order} {problem.outputs} {problem.inner}"
    return f"{card()}, cuBLASLt {version()}, trial {_TRIAL}: {sizes}, {problem.epilogue.name}"


def card() -> str:
    """Return the name and kind of the current GPU."""
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} sm{major}{minor}"


def _read() -> dict[str, Any]:
    folder = os.environ.get(_FOLDER)
    try:
        found = json.loads((Path(folder) / _FILE).read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
