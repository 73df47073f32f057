"""Which hosts a Slurm node list names."""

from __future__ import annotations

import itertools
import re

from paceline.errors import EnvironmentUnfit

_PIECE = re.compile(r"\[([0-9,\-]+)\]|([^\[\],]+)")
_LIST = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_MOST_HOSTS = 100_000


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a Slurm node list, in its order.

    >>> expand_hostlist("n[1,9-10],gpu-[08-09]-ib")
    ['n1', 'n9', 'n10', 'gpu-08-ib', 'gpu-09-ib']
    """
    words = _LIST.findall(text)
    if not words or ",".join(words) != text:
        raise _unreadable(text)
    return [host for word in words for host in _expand_word(word, text)]


def _expand_word(word: str, text: str) -> list[str]:
    parts: list[list[str]] = []
    end = 0
    for match in _PIECE.finditer(word):
        if match.start() != end:
            raise _unreadable(text)
        end = match.end()
        parts.append(_expand_ranges(match[1], text) if match[1] else [match[2]])
    if end != len(word):
        raise _unreadable(text)
    return ["".join(combination) for combination in itertools.product(*parts)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_HOSTS:
            raise _unreadable(text)
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def _unreadable(text: str) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"cannot read the node list {text[:200]!r}",
        fix="set MASTER_ADDR to the host of rank 0, for instance `export MASTER_ADDR=node1`",
    )
