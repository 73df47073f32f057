"""Figures of collectives and of shared work: ring, tree, shares of a sampler, chunks, replicas, processes."""

from __future__ import annotations

from canvas import MARGIN, WIDTH, Canvas

RANKS = range(4)
MIXED = ((2, 0, 3, 1), (1, 3, 0, 2), (3, 2, 0, 1), (0, 2, 1, 3))
"""A shuffled order of the samples of each chunk."""


def ring() -> Canvas:
    """Draw a ring all-reduce of four chunks on four ranks."""
    alt = "Ring all-reduce: in three steps each rank gets the sum of one chunk, in three more all ranks get all sums."
    canvas = Canvas(
        "Ring all-reduce",
        "Each rank talks to its neighbour only, and sends every chunk about twice.",
        346,
        alt,
    )
    top, cell = 116, 38
    for panel, (title, left) in enumerate(
        [("at first", 120), ("after 3 steps", 332), ("after 3 more", 544)]
    ):
        canvas.text(left + 2 * cell, top - 14, title, "soft")
        for rank in RANKS:
            cells = [_chunk(panel, rank, chunk) for chunk in RANKS]
            canvas.row(left, top + rank * 44, cell, 36, cells)
    for rank in RANKS:
        canvas.text(112, top + 23 + rank * 44, f"rank {rank}", f"right name r{rank}")
        if rank < 3:
            canvas.arrow([(84, top + 30 + rank * 44), (84, top + 52 + rank * 44)], "dim")
    bottom = top + 3 * 44 + 18
    canvas.arrow([(54, bottom), (36, bottom), (36, top + 18), (56, top + 18)], "dim")
    for left, first, second in ((272, "reduce-", "scatter"), (484, "all-", "gather")):
        canvas.arrow([(left + 8, top + 84), (left + 58, top + 84)], "hot")
        canvas.text(left + 32, top + 108, first, "soft small")
        canvas.text(left + 32, top + 124, second, "soft small")
    canvas.text(
        WIDTH / 2,
        326,
        "Bytes that a rank sends: 2 · (n - 1)/n of the data, whatever the number of ranks n.",
        "soft",
    )
    return canvas


def _chunk(panel: int, rank: int, chunk: int) -> tuple[str, str]:
    if panel == 0:
        return f"pale r{rank}", f"{'abcd'[chunk]}{rank}"
    if panel == 2 or chunk == (rank + 1) % 4:
        return "full hot", f"Σ{'abcd'[chunk]}"
    return "open dim", ""


def tree() -> Canvas:
    """Draw a tree all-reduce over two nodes of four ranks."""
    alt = "Tree all-reduce: eight ranks add up in three steps, and the sum goes back in three steps; one message crosses the nodes."
    canvas = Canvas(
        "Tree all-reduce",
        "Few steps, so it is quick for small messages; one edge crosses the nodes.",
        378,
        alt,
    )
    wide, top = 78, 96
    for node in range(2):
        canvas.box(MARGIN + 8 + node * 4 * wide, top, 4 * wide - 4, 64, f"pale r{node}")
        canvas.text(MARGIN + 8 + (node + 0.5) * 4 * wide, top + 22, f"node {node}", f"name r{node}")
    middle = [MARGIN + 8 + (rank + 0.5) * wide - 2 for rank in range(8)]
    for rank, x in enumerate(middle):
        canvas.text(x, top + 50, f"rank {rank}")
    places = [(x, top + 64.0) for x in middle]
    for level in range(3):
        y = top + 108 + level * 44
        joined = []
        for pair in range(0, len(places), 2):
            (x0, y0), (x1, y1) = places[pair : pair + 2]
            colour = "hot" if level == 2 else f"r{int(pair >= len(places) / 2)}"
            centre = (x0 + x1) / 2
            for x, start in ((x0, y0), (x1, y1)):
                canvas.path([(x, start), (x, y), (centre, y)], f"line {colour}")
            canvas.plus(centre, y, colour)
            joined.append((centre, y + 10.0))
        places = joined
    canvas.text(WIDTH / 2, top + 234, "the sum, which goes back the same way")
    canvas.text(
        WIDTH / 2,
        360,
        "2 · log₂ n steps. A ring takes 2 · (n - 1), each with a smaller message.",
        "soft",
    )
    return canvas


def shares() -> Canvas:
    """Draw the samples of an epoch: all ranks with all of them, and each with its share."""
    alt = "Without a sampler all four ranks see all samples; with one, each rank sees every fourth sample of one shuffled order."
    canvas = Canvas(
        "Who sees which sample",
        "One shuffled order of the epoch, from a seed that all ranks share.",
        372,
        alt,
    )
    order = [3, 11, 5, 14, 0, 9, 12, 7, 15, 2, 8, 4, 13, 1, 10, 6]
    left, cell = 132, 34
    canvas.text(left - 12, 114, "order", "right soft")
    canvas.row(left, 92, cell, 32, [(f"pale r{k % 4}", str(one)) for k, one in enumerate(order)])
    canvas.text(
        left, 156, "Lesson 3: all ranks see all samples, and do the same work four times", "left"
    )
    for rank in RANKS:
        canvas.box(left, 166 + rank * 13, 16 * cell, 9, f"full r{rank}")
    canvas.text(left - 12, 196, "ranks 0 to 3", "right soft")
    canvas.text(left, 252, "Lesson 4: a share each, order[rank::4]", "left")
    for rank in RANKS:
        x, y = left + (rank % 2) * 8.2 * cell, 264 + (rank // 2) * 48
        canvas.row(x + 62, y, cell, 32, [(f"pale r{rank}", str(one)) for one in order[rank::4]])
        canvas.text(x, y + 21, f"rank {rank}", f"left name r{rank}")
    return canvas


def chunks() -> Canvas:
    """Draw how chunked files are read: chunks in a shuffled order, and samples shuffled within each."""
    alt = "Chunks are read in a shuffled order, and the samples of each chunk are shuffled in memory; ranks take whole chunks."
    canvas = Canvas(
        "Streaming from chunks",
        "Disks read whole chunks fast, and scattered samples slowly.",
        336,
        alt,
    )
    left, cell = 132, 34
    for chunk in RANKS:
        x = left + chunk * 4.1 * cell
        canvas.text(x + 2 * cell, 108, f"chunk {chunk}", "soft small")
        canvas.row(x, 116, cell, 32, [("pale dim", str(4 * chunk + k)) for k in range(4)])
    canvas.text(left - 12, 137, "on disk", "right soft")
    for rank, pair in enumerate(((2, 0), (3, 1))):
        y = 196 + rank * 56
        canvas.text(left - 12, y + 21, f"rank {rank}", f"right name r{rank}")
        for place, chunk in enumerate(pair):
            mixed = MIXED[chunk]
            cells = [(f"pale r{rank}", str(4 * chunk + k)) for k in mixed]
            canvas.row(left + place * 4.1 * cell, y, cell, 32, cells)
        canvas.text(
            left + 8.4 * cell, y + 21, f"chunk {pair[0]}, then chunk {pair[1]}", "left soft"
        )
    canvas.text(
        WIDTH / 2, 316, "Chunks are shuffled first, then the samples within a chunk.", "soft"
    )
    return canvas


def replicas() -> Canvas:
    """Draw DataParallel beside DDP: threads of one process, or processes that exchange gradients."""
    alt = "DataParallel copies the model to all GPUs in every step and gathers the outputs on the first; DDP keeps a model per process and sends only gradients."
    canvas = Canvas(
        "DataParallel and DDP", "One process with threads, or one process per GPU.", 330, alt
    )
    for panel, title in enumerate(("DataParallel", "DistributedDataParallel")):
        left = MARGIN + panel * 336
        canvas.text(left + 156, 100, title)
        for gpu in range(3):
            x = left + gpu * 106
            kind = "pale r0" if panel == 0 and gpu == 0 else f"pale r{gpu}" if panel else "open dim"
            canvas.box(x, 150, 96, 62, kind)
            words = "model" if panel or gpu == 0 else "a copy"
            canvas.text(x + 48, 176, words)
            canvas.text(x + 48, 198, f"GPU {gpu}", "soft small")
    for gpu in (1, 2):
        x = MARGIN + gpu * 106 + 48
        canvas.arrow(
            [(MARGIN + 48, 150), (MARGIN + 48, 134 - gpu * 8), (x, 134 - gpu * 8), (x, 150)], "hot"
        )
        canvas.arrow([(x, 212), (x, 228 + gpu * 8), (MARGIN + 40 + gpu * 10, 228 + gpu * 8), (MARGIN + 40 + gpu * 10, 212)], "hot")  # fmt: skip
    canvas.text(MARGIN + 156, 272, "every step: weights out, outputs back,", "soft")
    canvas.text(MARGIN + 156, 292, "under one interpreter lock", "soft")
    right = MARGIN + 336
    for gpu in range(2):
        x = right + gpu * 106 + 96
        canvas.arrow([(x - 48, 212), (x - 48, 240), (x + 58, 240), (x + 58, 212)], "r1")
    canvas.arrow(
        [(right + 260, 212), (right + 260, 252), (right + 40, 252), (right + 40, 212)], "r1"
    )
    canvas.text(right + 156, 280, "every step: gradients only,", "soft")
    canvas.text(right + 156, 300, "during backward", "soft")
    return canvas


def processes() -> Canvas:
    """Draw who starts the ranks: the program, an agent, or Slurm."""
    alt = "Who starts the processes: the program itself with spawn, an agent per node with torchrun, srun on all nodes with Slurm."
    canvas = Canvas(
        "Who starts the ranks",
        "The program stays the same; the launcher passes each process its rank.",
        330,
        alt,
    )
    panels = [
        ("spawn", "python train.py", ["rank 0", "rank 1"], "lesson 13: one machine"),
        ("torchrun", "an agent per node", ["rank 0", "rank 1"], "lesson 14: restarts ranks"),
        ("Slurm", "srun on all nodes", ["rank 0", "rank 1"], "lesson 16: a job, many nodes"),
    ]
    for number, (title, parent, ranks, note) in enumerate(panels):
        left = MARGIN + number * 220
        canvas.text(left + 104, 102, title)
        canvas.box(left + 14, 118, 180, 40, "pale hot", parent)
        for rank, words in enumerate(ranks):
            x = left + 14 + rank * 96
            canvas.arrow(
                [(left + 104, 158), (left + 104, 178), (x + 42, 178), (x + 42, 204)], "dim"
            )
            canvas.box(x, 204, 84, 40, f"pale r{rank}", words)
        canvas.path([(left + 98, 224), (left + 110, 224)], "line dim")
        canvas.text(left + 104, 280, note, "soft")
    canvas.text(
        WIDTH / 2, 310, "The horizontal line is what the ranks send each other: gradients.", "soft"
    )
    return canvas
