"""Figures of a model and its parts: the training loop, number formats, FSDP, a tensor-parallel MLP."""

from __future__ import annotations

from canvas import MARGIN, WIDTH, Canvas


def loop() -> Canvas:
    """Draw the four parts of a training step."""
    alt = "A training step: forward gives a loss, backward gives gradients, the optimizer updates the weights; again with the next batch."
    canvas = Canvas(
        "One training step",
        "All lessons keep this loop; data parallelism adds one thing to it.",
        250,
        alt,
    )
    parts = [
        ("forward", "r0", "a loss"),
        ("backward", "r1", "gradients"),
        ("average", "hot", "with all ranks"),
        ("update", "r2", "new weights"),
    ]
    for number, (name, colour, note) in enumerate(parts):
        x = MARGIN + 14 + number * 162
        kind = "open" if name == "average" else "pale"
        canvas.box(x, 104, 120, 48, f"{kind} {colour}", name)
        canvas.text(x + 60, 174, note, "soft")
        if number < 3:
            canvas.arrow([(x + 122, 128), (x + 160, 128)], "dim")
    end = MARGIN + 14 + 3 * 162 + 60
    canvas.arrow([(end, 184), (end, 208), (MARGIN + 74, 208), (MARGIN + 74, 184)], "dim")
    canvas.text(WIDTH / 2, 228, "the next batch", "soft")
    return canvas


def precision() -> Canvas:
    """Draw the bits of fp32, bf16 and fp16."""
    alt = "fp32 has 8 exponent and 23 mantissa bits, bf16 8 and 7, fp16 5 and 10: bf16 keeps the range, fp16 keeps more digits."
    canvas = Canvas(
        "Three number formats", "Exponent bits give the range, mantissa bits the digits.", 300, alt
    )
    cell, left = 17.5, 106
    for number, (name, exponent, mantissa, note) in enumerate(
        [
            ("fp32", 8, 23, ""),
            ("bf16", 8, 7, "range of fp32, 2 to 3 digits"),
            ("fp16", 5, 10, "up to 65,504, 3 to 4 digits"),
        ]
    ):
        y = 100 + number * 54
        canvas.text(left - 14, y + 22, name, "right mono")
        canvas.row(
            left,
            y,
            cell,
            34,
            [("full dim", ""), *[("pale hot", "")] * exponent, *[("pale r0", "")] * mantissa],
        )
        canvas.text(left + (1 + exponent + mantissa) * cell + 12, y + 22, note, "left soft")
    for x, kind, words in (
        (left, "full dim", "sign"),
        (left + 90, "pale hot", "exponent"),
        (left + 210, "pale r0", "mantissa"),
    ):
        canvas.box(x, 266, 15, 15, kind)
        canvas.text(x + 22, 279, words, "left soft")
    return canvas


def fsdp() -> Canvas:
    """Draw how FSDP gathers a unit before it runs and frees it afterwards."""
    alt = "FSDP: each rank holds a quarter of every unit; a unit is gathered before it runs and freed afterwards, so at most one or two are whole."
    canvas = Canvas(
        "FSDP: gather, run, free",
        "Every rank keeps a shard of each unit, and gathers a whole unit only to run it.",
        372,
        alt,
    )
    top, high, left = 112, 52, 150
    times = ["before", "unit 1 runs", "unit 2 runs", "unit 3 runs"]
    for column, title in enumerate(times):
        x = left + column * 138
        canvas.text(x + 56, top - 14, title, "soft")
        for unit in range(3):
            y = top + unit * (high + 10)
            if column == unit + 1:
                canvas.box(x, y, 112, high, f"full r{unit}", "gathered")
            else:
                canvas.box(x, y, 28, high, f"pale r{unit}")
                canvas.box(x + 28, y, 84, high, f"open r{unit}")
        if column:
            canvas.arrow([(x - 24, top + 83), (x - 4, top + 83)], "dim")
    for unit in range(3):
        canvas.text(left - 16, top + unit * (high + 10) + 31, f"unit {unit + 1}", "right")
    canvas.text(
        left,
        320,
        "One of four ranks: filled is what it holds, dashed is what other ranks hold.",
        "left soft",
    )
    canvas.text(
        WIDTH / 2,
        350,
        "Weights, gradients and optimizer state: a quarter each, plus the unit that runs.",
        "soft",
    )
    return canvas


def tensor_parallel() -> Canvas:
    """Draw an MLP whose first matrix is cut by columns and the second by rows."""
    alt = "Tensor-parallel MLP: the first matrix is cut by columns, the second by rows; each rank computes its part alone, and one all-reduce adds the outputs."
    canvas = Canvas(
        "A tensor-parallel MLP",
        "Cut the first matrix by columns and the second by rows: one all-reduce per MLP.",
        330,
        alt,
    )
    canvas.box(MARGIN, 150, 66, 80, "pale dim", "x")
    canvas.text(MARGIN + 33, 252, "on both ranks", "soft small")
    for rank in range(2):
        y = 106 + rank * 104
        canvas.text(MARGIN + 200, y - 8, f"rank {rank}", f"name r{rank}")
        canvas.arrow(
            [(MARGIN + 70, 190), (MARGIN + 92, 190), (MARGIN + 92, y + 34), (MARGIN + 116, y + 34)],
            "dim",
        )
        canvas.box(MARGIN + 118, y, 64, 68, f"pale r{rank}", f"A{rank}")
        canvas.arrow([(MARGIN + 186, y + 34), (MARGIN + 226, y + 34)], "dim")
        canvas.box(MARGIN + 228, y + 10, 96, 48, "open dim", "GELU")
        canvas.arrow([(MARGIN + 328, y + 34), (MARGIN + 358, y + 34)], "dim")
        canvas.box(MARGIN + 360, y + 12, 96, 44, f"pale r{rank}", f"B{rank}")
        canvas.arrow(
            [
                (MARGIN + 460, y + 34),
                (MARGIN + 492, y + 34),
                (MARGIN + 492, 190),
                (MARGIN + 512, 190),
            ],
            "hot",
        )
    canvas.plus(MARGIN + 526, 190, "hot")
    canvas.text(MARGIN + 531, 228, "all-reduce", "soft small")
    canvas.arrow([(MARGIN + 552, 190), (MARGIN + 580, 190)], "dim")
    canvas.box(MARGIN + 582, 150, 66, 80, "pale dim", "y")
    canvas.text(
        WIDTH / 2,
        312,
        "A is cut into columns A0, A1 and B into rows B0, B1, so GELU needs no exchange.",
        "soft",
    )
    return canvas
