"""No garbage collection while a recipe starts: imports make many objects and hardly any garbage."""

from __future__ import annotations

import gc

_paused: list[bool] = []


def pause_gc() -> None:
    """Collect no garbage until the training loop begins: collections take a fifth of the time of torch's imports."""
    _paused.append(True)
    gc.disable()


def resume_gc() -> None:
    """Collect garbage again if it was paused, and never look at the objects of the start."""
    if _paused:
        _paused.clear()
        gc.freeze()
        gc.enable()
