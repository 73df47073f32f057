"""The last collectives of this rank, from torch's flight recorder. It is read as JSON; its other form is a pickle."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

_READERS = (
    "_dump_nccl_trace_json",
    "_dump_fr_trace_json",
)  # the first is there where torch was built with NCCL
_LAST = 64  # more than a step has, as a rule: what is odd shows by the steps before


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank has begun it."""

    group: str
    number: int
    """Which one of its group, from 1 on: all ranks count alike."""
    name: str
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    done: bool

    @property
    def label(self) -> str:
        """What to call it in a sentence.

        >>> Collective("0", 412, "all-reduce", ((3,),), ("Float",), False).label
        'all-reduce 412'
        """
        return f"{self.name} {self.number}"


def last_collectives() -> list[Collective]:
    """Return the last collectives of this rank, the oldest first; none where torch does not tell."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    for name in _READERS:
        reader = getattr(bindings, name, None)
        if reader is not None:
            found += _parsed(reader)
    return sorted(found, key=lambda entry: entry.number)[-_LAST:]


def _parsed(reader: Any) -> list[Collective]:
    """Return what one recorder says. Its format is torch's own affair, so a new one is no error of the training."""
    try:
        entries = json.loads(reader(True, False)).get("entries") or []  # noqa: FBT003 - torch takes them by place
        return [collective(entry) for entry in entries if not entry.get("is_p2p")]
    except (RuntimeError, TypeError, ValueError, KeyError):
        return []


def collective(entry: dict[str, Any]) -> Collective:
    """Return an entry of the recorder."""
    return Collective(
        str(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        plain_name(str(entry["profiling_name"])),
        tuple(tuple(int(length) for length in shape) for shape in entry["input_sizes"]),
        tuple(str(kind) for kind in entry["input_dtypes"]),
        bool(entry["retired"]) or entry["state"] == "completed",
    )


def plain_name(text: str) -> str:
    """Return what people call a collective.

    >>> plain_name("gloo:all_reduce"), plain_name("nccl:_all_gather_base"), plain_name("nccl:all_reduce_barrier")
    ('all-reduce', 'all-gather', 'barrier')
    """
    name = text.rpartition(":")[2].strip("_").removesuffix("_base")
    return "barrier" if name.endswith("barrier") else name.replace("_", "-")
