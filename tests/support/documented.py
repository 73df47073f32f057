"""Which keys do the documents name? The first column of their tables."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"


def keys_of(document: str, heading: str) -> set[str]:
    """Return the keys that the first column of the table below a heading names."""
    _, _, below = (DOCUMENTS / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    rows = re.findall(r"^\|([^|]*)\|", below.partition("\n## ")[0], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def words_of(document: str, heading: str) -> set[str]:
    """Return all words that the text below a heading sets apart."""
    _, _, below = (DOCUMENTS / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    return set(re.findall(r"`([^`]+)`", below.partition("\n## ")[0]))
