"""A GPT so small that a test can train it."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.config import config_from_words
from paceline.recipes.gpt_config import GptConfig
from paceline.rundir import RunDir

TINY = [
    "layers=1", "heads=2", "embedding_dim=16", "context_length=8", "steps=3", "batch.global_size=8", "batch.lanes=2",
    "lr.schedule=constant", "lr.warmup_samples=0", "checkpoint.every=end", "log.progress=lines",
]  # fmt: skip


def tiny(*words: object) -> GptConfig:
    """Return settings of a GPT with one block of 16 numbers."""
    return config_from_words(GptConfig, [*TINY, *map(str, words)])


def train(*words: object) -> RunDir:
    """Train it in this process; return the run."""
    from paceline.recipes.gpt import main

    config = tiny(*words)
    main(config)
    return RunDir.of(config)


def digest(run: RunDir) -> str:
    """Return the digest of weights and optimizer state at the end of a run."""
    return str(json.loads(run.events.read_text().splitlines()[-1])["digest"])


def write(folder: Path, text: str, name: str = "text") -> Path:
    (folder / name).write_bytes(text.encode())
    return folder / name
