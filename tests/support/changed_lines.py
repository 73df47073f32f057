"""How many lines does a change remove and add?"""

from __future__ import annotations

import difflib


def changed_lines(before: str, after: str) -> tuple[int, int]:
    r"""Return the number of removed and of added lines; indentation and empty lines do not count.

    >>> changed_lines("a\nb\nc\n", "a\nwith x:\n    c\n\n")
    (1, 1)
    """
    lines = [
        [line.strip() for line in text.splitlines() if line.strip()] for text in (before, after)
    ]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return len(lines[0]) - same, len(lines[1]) - same
