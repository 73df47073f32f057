"""The figures of the course, and the lessons that show them. `python scripts/docs/figures.py FOLDER` writes them all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from canvas import Canvas
from figures_cluster import container, opens, scaling_study, silent_error, straggler
from figures_collectives import chunks, processes, replicas, ring, shares, tree
from figures_models import (
    context_parallel,
    cuda_graph,
    fsdp,
    loop,
    lora,
    precision,
    tensor_parallel,
)
from figures_sheet import collectives
from figures_time import (
    accumulation,
    global_batch,
    hang,
    kill,
    overlap,
    pipeline,
    requeue,
    speed_up,
)

FIGURES: dict[str, Callable[[], Canvas]] = {
    "ring": ring, "tree": tree, "shares": shares, "chunks": chunks, "replicas": replicas, "processes": processes,
    "loop": loop, "precision": precision, "fsdp": fsdp, "tensor-parallel": tensor_parallel,
    "overlap": overlap, "speed-up": speed_up, "global-batch": global_batch, "accumulation": accumulation,
    "kill": kill, "requeue": requeue, "hang": hang, "pipeline": pipeline, "collectives": collectives,
    "straggler": straggler, "silent-error": silent_error, "context-parallel": context_parallel, "cuda-graph": cuda_graph,
    "opens": opens, "container": container, "scaling-study": scaling_study, "lora": lora,
}  # fmt: skip
OF_LESSON = {
    0: "ring", 1: "ring", 2: "loop", 3: "shares", 4: "shares", 5: "overlap", 6: "overlap", 7: "speed-up", 8: "global-batch",
    9: "tree", 10: "tree", 11: "chunks", 12: "loop", 13: "processes", 14: "processes", 15: "kill", 16: "requeue",
    17: "replicas", 18: "accumulation", 19: "precision", 20: "hang", 21: "overlap", 22: "fsdp", 24: "tensor-parallel",
    25: "pipeline", 26: "fsdp", 27: "accumulation", 28: "straggler", 29: "silent-error",
    30: "context-parallel", 31: "cuda-graph", 32: "opens", 33: "container", 34: "scaling-study", 35: "lora",
}  # fmt: skip
"""The figure of each lesson; lesson 23 has the drawing of the contract."""


def figure_files(folder: Path) -> dict[Path, str]:
    """Return the figures by their files in a folder."""
    return {folder / f"{name}.svg": figure().svg() for name, figure in FIGURES.items()}


def figure_of(number: int) -> str:
    """Return the file of a lesson's figure, relative to the folder of images.

    >>> figure_of(20), figure_of(23)
    ('course/hang.svg', 'contract.svg')
    """
    return f"course/{OF_LESSON[number]}.svg" if number in OF_LESSON else "contract.svg"


if __name__ == "__main__":
    for file, svg in figure_files(Path(sys.argv[1])).items():
        file.write_text(svg, encoding="utf-8")
