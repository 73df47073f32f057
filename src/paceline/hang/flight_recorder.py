"""The newest collectives of this rank, from torch's flight recorder, read as JSON; its other format is a pickle."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

# The first one exists where torch was built with NCCL.
_READERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_LAST = 128  # usually more than one step: earlier steps show which collective deviates
EVERYONE = "0"
"""The process group of all ranks."""


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank started it."""

    group: str
    number: int
    """Sequence number in its process group, from 1 on, equal on all ranks."""
    name: str
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    done: bool

    @property
    def label(self) -> str:
        """Name and number.

        >>> Collective("0", 412, "all-reduce", ((3,),), ("Float",), False).label
        'all-reduce 412'
        """
        return f"{self.name} {self.number}"


def last_collectives() -> list[Collective]:
    """Return the newest collectives of this rank, the oldest first; empty where torch records none."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    entries: list[tuple[int, Collective]] = []
    for name in _READERS:
        reader = getattr(bindings, name, None)
        if reader is not None:
            entries += _read(reader)
    # Not by number: every process group counts its own.
    entries.sort(key=lambda timed: timed[0])
    return [entry for _, entry in entries[-_LAST:]]


def _read(reader: Any) -> list[tuple[int, Collective]]:
    """Return the entries of one recorder, each with its time.

    torch may change the format, which must not fail the training.
    """
    try:
        entries = json.loads(reader(True, False)).get("entries") or []  # noqa: FBT003 - positional in torch
        return [
            (int(entry["time_created_ns"]), collective(entry))
            for entry in entries
            if not entry.get("is_p2p")
        ]
    except (RuntimeError, TypeError, ValueError, KeyError):
        return []


def collective(entry: dict[str, Any]) -> Collective:
    """Convert an entry of the recorder's JSON."""
    return Collective(
        str(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        plain_name(str(entry["profiling_name"])),
        tuple(tuple(int(length) for length in shape) for shape in entry["input_sizes"]),
        tuple(str(kind) for kind in entry["input_dtypes"]),
        bool(entry["retired"]) or entry["state"] == "completed",
    )


def plain_name(text: str) -> str:
    """Return the common name of a collective.

    >>> plain_name("gloo:all_reduce"), plain_name("nccl:_all_gather_base"), plain_name("nccl:all_reduce_barrier")
    ('all-reduce', 'all-gather', 'barrier')
    """
    name = text.rpartition(":")[2].strip("_").removesuffix("_base")
    return "barrier" if name.endswith("barrier") else name.replace("_", "-")
