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


def context_parallel() -> Canvas:
    """Draw which rank computes which block of attention, and in which round of the ring."""
    alt = "Ring attention on four ranks: queries stay, keys and values go around; in a causal model rank 0 computes one block and rank 3 four; the rest is masked."
    canvas = Canvas(
        "Attention in a ring",
        "Each rank has a part of the text: its queries stay, keys and values go around.",
        370,
        alt,
    )
    cell, left, top = 50, MARGIN + 100, 126
    canvas.text(left + 2 * cell, 98, "keys and values of rank", "soft")
    for rank in range(4):
        y = top + rank * cell
        canvas.text(left + (rank + 0.5) * cell, top - 8, str(rank), f"name r{rank}")
        canvas.text(left - 12, y + 30, f"queries of {rank}", f"right name r{rank}")
        cells = [(f"pale r{k}" if k <= rank else "open dim", str((rank - k) % 4) if k <= rank else "") for k in range(4)]  # fmt: skip
        canvas.row(left, y, cell, cell - 4, cells)
        canvas.text(left + 4 * cell + 12, y + 30, f"{rank + 1} block" + "s" * (rank > 0), "left soft")  # fmt: skip
    x, y = WIDTH - MARGIN - 118, top + 92
    places = [(x, y - 72), (x + 84, y), (x, y + 72), (x - 84, y)]
    for rank, (at, to) in enumerate(zip(places, [*places[1:], places[0]], strict=True)):
        step = [(at[0] + (to[0] - at[0]) * part, at[1] + (to[1] - at[1]) * part) for part in (0.3, 0.7)]  # fmt: skip
        canvas.arrow(step, f"r{rank}")
        canvas.box(at[0] - 20, at[1] - 15, 40, 30, f"full r{rank}", str(rank))
    canvas.text(x, y + 5, "K, V", "soft")
    canvas.text(WIDTH / 2, 350, "Numbers are rounds of the ring; dashed blocks are masked, so rank 0 waits for rank 3.", "soft")  # fmt: skip
    return canvas


def cuda_graph() -> Canvas:
    """Draw kernels that the host launches one by one, and a graph that it launches once."""
    alt = "Eager: the host launches six kernels one by one and the device waits between them; a captured graph is one launch, and the kernels follow each other."
    canvas = Canvas(
        "One launch instead of many",
        "Launching a small kernel takes the host longer than it takes the device to run it.",
        344,
        alt,
    )
    left, unit = 116, 92
    for panel, title in enumerate(("eager: six launches", "captured once, then replayed")):
        top = 100 + panel * 112
        canvas.text(MARGIN, top, title, "left")
        canvas.text(left - 14, top + 33, "host", "right soft")
        canvas.text(left - 14, top + 71, "device", "right soft")
        if panel == 0:
            for k in range(6):
                canvas.box(left + k * unit, top + 14, unit - 4, 30, "pale r1", "launch")
                canvas.box(left + (k + 1) * unit - 28, top + 52, 34, 30, "full r0")
        else:
            canvas.box(left, top + 14, unit - 4, 30, "pale r1", "replay")
            canvas.row(left + unit - 28, top + 52, 37, 30, [("full r0", "")] * 6)
            canvas.text(left + 3.4 * unit, top + 33, "free for other work", "left soft")
    canvas.arrow([(left, 302), (WIDTH - MARGIN, 302)], "dim")
    canvas.text(WIDTH - MARGIN, 294, "time", "right soft")
    canvas.text(WIDTH / 2, 328, "A replay repeats the same kernels at the same addresses: no new shape, no if.", "soft")  # fmt: skip
    return canvas


def lora() -> Canvas:
    """Draw a frozen matrix with two thin ones beside it."""
    alt = "LoRA: x goes through the frozen matrix W and through the thin matrices A and B; both outputs are added. Only A and B are trained, sent and saved."
    canvas = Canvas(
        "LoRA: two thin matrices beside a frozen one", "y = (W + BA) x, and B starts at zero.", 340, alt
    )  # fmt: skip
    canvas.box(MARGIN + 4, 168, 54, 54, "pale dim", "x")
    canvas.arrow([(MARGIN + 62, 195), (MARGIN + 92, 195), (MARGIN + 92, 150), (MARGIN + 150, 150)], "dim")  # fmt: skip
    canvas.arrow([(MARGIN + 92, 195), (MARGIN + 92, 264), (MARGIN + 120, 264)], "r0")
    canvas.box(MARGIN + 154, 92, 116, 116, "pale dim", "W, frozen")
    canvas.box(MARGIN + 122, 254, 116, 20, "full r0", "A")
    canvas.arrow([(MARGIN + 242, 264), (MARGIN + 282, 264)], "r0")
    canvas.box(MARGIN + 285, 222, 20, 84, "full r0", "B")
    canvas.arrow([(MARGIN + 274, 150), (MARGIN + 352, 150), (MARGIN + 352, 182)], "dim")
    canvas.arrow([(MARGIN + 309, 264), (MARGIN + 352, 264), (MARGIN + 352, 208)], "r0")
    canvas.plus(MARGIN + 352, 195, "r0")
    canvas.arrow([(MARGIN + 364, 195), (MARGIN + 398, 195)], "dim")
    canvas.box(MARGIN + 400, 168, 54, 54, "pale dim", "y")
    for number, (name, whole, part) in enumerate(
        [("trained", "269,322", "7,272"), ("sent", "1,077 kB", "29 kB"), ("saved", "1,078 kB", "29 kB")]
    ):  # fmt: skip
        y = 130 + number * 54
        canvas.text(WIDTH - MARGIN, y, f"{name}: {part}", "right name r0")
        canvas.text(WIDTH - MARGIN, y + 19, f"instead of {whole}", "right soft")
    canvas.text(WIDTH / 2, 326, "Gradients exist for A and B only: DDP sends them, and a checkpoint holds them.", "soft")  # fmt: skip
    return canvas
