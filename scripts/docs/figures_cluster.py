"""Figures of a run on a cluster: a straggler, a silent error, opens of files, a container, a scaling study."""

from __future__ import annotations

from canvas import MARGIN, WIDTH, Canvas


def straggler() -> Canvas:
    """Draw a step of two ranks, one of which is slow in forward."""
    alt = "Two ranks take as long for a step: rank 1 is slow in forward, rank 0 waits for it inside of backward; their first buckets are ready at 13 and 111 ms."
    canvas = Canvas(
        "Which rank is slow?",
        "The step takes as long on both, and backward is long on the rank that waits.",
        316,
        alt,
    )
    left, ms = 116, 4.3
    rows = [
        ([(0, 10, "pale r0", ""), (10, 13, "full r0", ""), (13, 121, "open r0", "backward: waits in the all-reduce"), (121, 126, "pale r2", "")], 13),
        ([(0, 106, "full hot", "forward: slow"), (106, 121, "full r1", ""), (121, 126, "pale r2", "")], 111),
    ]  # fmt: skip
    for rank, (parts, ready) in enumerate(rows):
        y = 116 + rank * 84
        canvas.text(left - 14, y + 26, f"rank {rank}", f"right name r{rank}")
        for start, end, kind, words in parts:
            canvas.box(left + start * ms, y, (end - start) * ms - 2, 40, kind, words)
        x = left + ready * ms
        canvas.arrow([(x, y - 16), (x, y - 2)], "dim")
        side = "left" if rank == 0 else "right"
        canvas.text(
            x + (8 if rank == 0 else -8), y - 8, f"first bucket: {ready} ms", f"{side} soft"
        )
    canvas.path([(left + 126 * ms, 92), (left + 126 * ms, 254)], "dash dim")
    canvas.arrow([(left, 264), (WIDTH - MARGIN, 264)], "dim")
    canvas.text(WIDTH - MARGIN, 284, "time", "right soft")
    canvas.text(
        left, 292, "Until its first bucket, a rank works alone: the late one is the straggler.", "left soft"
    )  # fmt: skip
    return canvas


def silent_error() -> Canvas:
    """Draw the tensors of four ranks after a flipped bit, and after another learning rate."""
    alt = "Digests of the tensors of four ranks: a flipped bit changes one tensor of rank 3, another learning rate all of them; the other three ranks agree."
    canvas = Canvas(
        "Four ranks, six tensors each: which one is wrong?",
        "The losses look alike; the bits do not. The majority is right.",
        322,
        alt,
    )
    for panel, (title, wrong) in enumerate(
        [("a flipped bit: one tensor", {3}), ("another learning rate: all tensors", set(range(6)))]
    ):
        x = MARGIN + 22 + panel * 330
        canvas.text(x + 138, 100, title)
        for rank in range(4):
            column = x + rank * 70
            for tensor in range(6):
                kind = "full hot" if rank == 3 and tensor in wrong else "pale r0"
                canvas.box(column, 114 + tensor * 21, 56, 17, kind)
            canvas.text(column + 28, 258, f"rank {rank}", "soft small")
            digest, colour = ("07c9", "hot") if rank == 3 else ("5a1e", "r0")
            canvas.text(column + 28, 278, digest, f"mono name {colour}")
    canvas.text(WIDTH / 2, 306, "The last row: a digest of all bits of a rank, which is compared before every save.", "soft")  # fmt: skip
    return canvas


def opens() -> Canvas:
    """Draw readers that open one file per sample, and readers that open shards."""
    alt = "One file per sample: 1,437 opens per epoch wait for one metadata server. Four shards and an index: five opens per reader."
    canvas = Canvas(
        "Every open asks the same server",
        "File names are kept on few servers, bytes on many: count the opens.",
        340,
        alt,
    )
    for panel, (title, count) in enumerate(
        [("one file per sample", "1,437 opens per epoch"), ("four shards and an index", "5 opens per reader")]
    ):  # fmt: skip
        y = 96 + panel * 112
        canvas.text(MARGIN, y, title, "left")
        canvas.box(MARGIN, y + 14, 92, 60, "pale r1", "readers")
        canvas.box(MARGIN + 214, y + 14, 124, 60, "pale hot", "metadata")
        many = 9 if panel == 0 else 2
        for k in range(many):
            height = y + 44 + (k - (many - 1) / 2) * 6.5
            canvas.arrow([(MARGIN + 96, height), (MARGIN + 210, height)], "hot")
        canvas.arrow([(MARGIN + 342, y + 44), (MARGIN + 376, y + 44)], "dim")
        if panel == 0:
            for k in range(48):
                canvas.box(MARGIN + 382 + k % 16 * 16.6, y + 14 + k // 16 * 21, 13, 17, "pale r0")
        else:
            cells = [("full dim", "index"), *[("pale r0", "shard")] * 4]
            canvas.row(MARGIN + 380, y + 14, 53.4, 60, cells)
        canvas.text(WIDTH - MARGIN, y, count, "right name hot")
    canvas.text(WIDTH / 2, 314, "More readers do not help where each open waits for its turn; fewer opens do.", "soft")  # fmt: skip
    return canvas


def container() -> Canvas:
    """Draw what a container keeps out, and the option that lets each of it in."""
    alt = "An isolated container keeps out variables, network, shared memory and folders, so a rank is rank 0 of 1; an option opens each of them."
    canvas = Canvas(
        "What a container keeps out",
        "Same kernel, own variables, network, shared memory and files.",
        348,
        alt,
    )
    rows = [
        ("variables", "rank 0 of 1", "--env"),
        ("launcher's port", "refused", "--network host"),
        ("shared memory", "64 MiB", "--ipc host"),
        ("data, checkpoints", "missing, lost", "--mount"),
    ]
    middle, wide = WIDTH / 2, 172
    for x, title, kind in ((MARGIN, "isolated", "pale hot"), (WIDTH - MARGIN - wide, "opened", "pale r0")):  # fmt: skip
        canvas.box(x, 112, wide, 196, kind)
        canvas.text(x + wide / 2, 102, title)
    canvas.text(middle, 102, "the host")
    for number, (name, result, option) in enumerate(rows):
        y = 126 + number * 44
        canvas.box(middle - 72, y, 144, 34, "pale dim", name)
        canvas.arrow([(middle - 76, y + 17), (MARGIN + wide + 14, y + 17)], "hot", "dash")
        canvas.path([(MARGIN + wide + 8, y + 5), (MARGIN + wide + 8, y + 29)], "line hot")
        canvas.text(MARGIN + wide / 2, y + 22, result)
        canvas.arrow([(middle + 76, y + 17), (WIDTH - MARGIN - wide + 18, y + 17)], "r0")
        canvas.text(WIDTH - MARGIN - wide / 2 + 10, y + 22, option, "mono")
    canvas.text(WIDTH / 2, 334, "Nothing fails: a rank without its variables trains alone. Options are those of Docker.", "soft")  # fmt: skip
    return canvas


def scaling_study() -> Canvas:
    """Draw measured speed-ups with their errors, the ideal line, and Amdahl's law."""
    alt = "Measured speed-ups 1, 1.60 and 1.83 on 1, 2 and 4 ranks with error bars, Amdahl's law for a serial part of 37 %, its bound 2.7, and the ideal line."
    canvas = Canvas(
        "Speed-up, its error and its bound",
        "Strong scaling of lesson 34: the same step on more ranks.",
        372,
        alt,
    )
    left, base, unit, high, serial = 96, 318, 66, 70, 0.367
    canvas.arrow([(left, base), (left, 88)], "dim")
    canvas.arrow([(left, base), (WIDTH - MARGIN, base)], "dim")
    canvas.text(left + 12, 96, "speed-up", "left soft")
    canvas.text(WIDTH - MARGIN, base + 38, "ranks", "right soft")
    for ranks in (1, 2, 4, 8):
        canvas.text(left + ranks * unit, base + 20, str(ranks), "soft")
    for number in (1, 2, 3):
        canvas.text(left - 12, base - number * high + 5, str(number), "right soft")
    canvas.path([(left + unit, base - high), (left + 3 * unit, base - 3 * high)], "dash dim")
    canvas.text(left + 3 * unit + 8, base - 3 * high + 8, "ideal", "left soft")
    bound = base - high / serial
    canvas.path([(left + 3.6 * unit, bound), (left + 8.4 * unit, bound)], "dash hot")
    canvas.text(left + 8.4 * unit, bound - 10, "bound 1 / s = 2.7", "right name hot")
    curve = [1 + 0.1 * k for k in range(71)]
    points = [(left + p * unit, base - high / (serial + (1 - serial) / p)) for p in curve]
    canvas.path(points, "line r1")
    canvas.text(left + 8 * unit, base - 2.03 * high + 12, "Amdahl, s = 37 %", "right name r1")
    for ranks, speed_up, error in ((1, 1.0, 0.0), (2, 1.6, 0.03), (4, 1.83, 0.17)):
        x, y, reach = left + ranks * unit, base - speed_up * high, error * high
        if error:
            canvas.path([(x, y - reach), (x, y + reach)], "line r0")
        canvas.box(x - 4, y - 4, 8, 8, "full r0")
    canvas.text(left + 4.2 * unit, base - 1.5 * high, "measured, 3 rounds", "left name r0")
    return canvas
