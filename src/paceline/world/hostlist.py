"""Slurm's compact lists: host names, and tasks per node."""

from __future__ import annotations

import itertools
import re

from paceline.errors import EnvironmentUnfit

_PIECE = re.compile(r"\[([0-9,\-]+)\]|([^\[\],]+)")
_LIST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_MOST_HOSTS = 100_000


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm node list, in its order.

    >>> expand_hostlist("n[1,9-10],gpu-[08-09]-ib")
    ['n1', 'n9', 'n10', 'gpu-08-ib', 'gpu-09-ib']
    """
    items = _LIST.findall(text)
    if not items or ",".join(items) != text:
        raise _unreadable(text)
    hosts: list[str] = []
    for item in items:
        hosts += _expand_item(item, text)
    return hosts


def _expand_item(item: str, text: str) -> list[str]:
    parts: list[list[str]] = []
    end = 0
    for match in _PIECE.finditer(item):
        if match.start() != end:
            raise _unreadable(text)
        end = match.end()
        parts.append(_expand_ranges(match[1], text) if match[1] else [match[2]])
    if end != len(item):
        raise _unreadable(text)
    return ["".join(combination) for combination in itertools.product(*parts)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_HOSTS:
            raise _unreadable(text)
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def tasks_on_node(text: str, node: int) -> int:
    """Return the number of tasks of one node from SLURM_STEP_TASKS_PER_NODE.

    >>> [tasks_on_node("2(x2),1", node) for node in range(3)]
    [2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if node >= len(counts):
        raise EnvironmentUnfit(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} has no number of tasks for node {node}",
            fix="do not export SLURM variables by hand; start with `srun`, or with `paceline run` inside the allocation",
        )
    return counts[node]


def _unreadable(text: str) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"cannot read the node list {text[:200]!r}",
        fix="set MASTER_ADDR to the host of rank 0, for example `export MASTER_ADDR=node1`",
    )
