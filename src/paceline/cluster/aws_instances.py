"""EC2 instance types: how many GPUs each has, and whether it has EFA, AWS's fast network."""

from __future__ import annotations

import re
from typing import NamedTuple


class Instance(NamedTuple):
    """The hardware of an instance type."""

    gpus: int
    efa: bool


_SIZES = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge"), Instance(1, efa=False)),
    **dict.fromkeys(("8xlarge", "16xlarge"), Instance(1, efa=True)),
    **dict.fromkeys(("12xlarge", "24xlarge"), Instance(4, efa=True)),
    "48xlarge": Instance(8, efa=True),
}

KNOWN_INSTANCES = {
    **dict.fromkeys(("p4d.24xlarge", "p4de.24xlarge"), Instance(8, efa=True)),
    **dict.fromkeys(("p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"), Instance(8, efa=True)),
    **dict.fromkeys(("p6-b200.48xlarge", "p6-b300.48xlarge"), Instance(8, efa=True)),
    "p5.4xlarge": Instance(1, efa=True),
    **{
        f"{family}.{size}": facts
        for family in ("g5", "g6", "g6e")
        for size, facts in _SIZES.items()
    },
    **dict.fromkeys(("g4dn.xlarge", "g4dn.2xlarge", "g4dn.4xlarge"), Instance(1, efa=False)),
    "g4dn.12xlarge": Instance(4, efa=True),
    "g4dn.metal": Instance(8, efa=True),
    **dict.fromkeys(
        ("c5n.9xlarge", "c5n.18xlarge", "c6in.32xlarge", "c7i.48xlarge"), Instance(0, efa=True)
    ),
    **dict.fromkeys(
        ("hpc6a.48xlarge", "hpc6id.32xlarge", "hpc7a.96xlarge", "hpc8a.96xlarge"),
        Instance(0, efa=True),
    ),
}
"""Instance types whose GPUs and EFA support are known, as AWS publishes them."""


def is_arm(instance: str) -> bool:
    """Return whether an instance type has AWS's ARM processors: a g follows its generation number.

    >>> [is_arm(kind) for kind in ("c7gn.16xlarge", "g5g.xlarge", "g5.xlarge", "p4d.24xlarge")]
    [True, True, False, False]
    """
    return bool(re.match(r"[a-z]+[0-9]+g", instance))
