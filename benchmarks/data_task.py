"""What one process of the data benchmark reads, and how MosaicML streaming is imported."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What one process reads."""

    folder: Path
    records: int
    side: int
    batch: int
    """Of all ranks together."""
    rank: int = 0
    world: int = 1


def import_streaming() -> Any:
    """Import MosaicML streaming without its bundled datasets, which need torchvision; its reader is unchanged."""
    for name in ("text", "vision", "multimodal"):
        sys.modules.setdefault(f"streaming.{name}", types.ModuleType(f"streaming.{name}"))
    import streaming

    return streaming
