"""Seeds of all random generators: a pure function of (seed, step, lane), on whichever rank."""

from __future__ import annotations

import _random
import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

_PYTHONS_OWN: Any = random.seed.__self__  # type: ignore[attr-defined]
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash some numbers to 64 bits.

    >>> mix(0, 1, 2) != mix(0, 2, 1), 0 <= mix(5) < 2**64
    (True, True)
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 29)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 32
    return state


def generator_states() -> str:
    """Return a digest of the states of the generators that `seed_everything` seeds, but for those of GPUs."""
    drawn = hashlib.sha256(torch.default_generator.get_state().numpy().tobytes())
    _, keys, *places = numpy.random.get_state()  # noqa: NPY002 - the global generator
    drawn.update(numpy.asarray(keys).tobytes() + repr((places, random.getstate())).encode())
    return drawn.hexdigest()


def seed_everything(*numbers: int) -> None:
    """Seed the generators of torch, NumPy and Python.

    `torch.manual_seed` asks every kind of accelerator, which takes 270 microseconds; this takes 10.
    """
    key = mix(*numbers)
    torch.default_generator.manual_seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from the global generator
    _random.Random.seed(_PYTHONS_OWN, key)  # the effect of random.seed, in half the time
    _PYTHONS_OWN.gauss_next = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)


@contextlib.contextmanager
def same_generators() -> Iterator[None]:
    """Give the generators of torch, CUDA, NumPy and Python back their state."""
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()  # noqa: NPY002
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device_state = torch.cuda.get_rng_state() if on_gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
