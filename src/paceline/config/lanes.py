"""How many lanes a run has if nobody gives a number: `batch.lanes=auto`."""

from __future__ import annotations

LANES_ON_CPU = 4
"""So that a training that began on one process can go on with up to four, and be compared with them."""


class AutoLanes(int):
    """A number of lanes that nobody has given: `with paceline.Run(config)` replaces it by the number of the run.

    It is a type, not a memory of the config, so that it survives `dataclasses.replace`.
    """


AUTO_LANES = AutoLanes(LANES_ON_CPU)
"""The default: what a script reads before the ranks are known."""


def choose_lanes(
    given: int,
    *,
    saved: int = 0,
    ranks: int = 1,
    on_cpu: bool = True,
    global_size: int,
    replicas: int = 1,
) -> int:
    """Return the number of lanes of a run: the number that was given, that of the run that is continued, or a new one.

    - `saved`: the lanes of the run that is continued; 0: it begins. Another number that is given is refused later, by name.
    - `ranks`: the ranks of this start, or the upper end of an elastic range if that is larger.
    - `replicas`: those of local SGD; 1: none.

    >>> choose_lanes(AUTO_LANES, global_size=64), choose_lanes(AUTO_LANES, on_cpu=False, global_size=64)
    (4, 1)
    >>> choose_lanes(AUTO_LANES, ranks=6, global_size=64), choose_lanes(AUTO_LANES, saved=6, ranks=2, global_size=64)
    (6, 6)
    >>> choose_lanes(AUTO_LANES, ranks=6, global_size=64, replicas=4), choose_lanes(AUTO_LANES, ranks=6, global_size=5)
    (8, 5)
    """
    if not isinstance(given, AutoLanes):
        return given
    if saved:
        return saved
    wanted = max(ranks, LANES_ON_CPU if on_cpu else 1)
    blocks = min(-(-wanted // replicas), max(1, global_size // replicas))
    return blocks * replicas
