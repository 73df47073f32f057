"""How ranks are spoken of."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_words(ranks: Sequence[int]) -> str:
    """Return ranks as people say them.

    >>> ranks_words([3]), ranks_words([0, 1, 2, 5]), ranks_words([0, 2])
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'' if len(ranks) == 1 else 's'} {words}"
