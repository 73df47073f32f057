"""Figures with a time axis: overlap, speed-up, accumulation, a kill, a requeue, a hang, a pipeline."""

from __future__ import annotations

from canvas import MARGIN, WIDTH, Canvas

LEFT = 150


def overlap() -> Canvas:
    """Draw backward and all-reduce: one after the other, and overlapped in buckets."""
    alt = "By hand the all-reduce of each gradient begins after backward; DDP sends a bucket as soon as its gradients are ready, so the step is shorter."
    canvas = Canvas(
        "Buckets overlap with backward",
        "The last layer has its gradient first, so its bucket can leave first.",
        372,
        alt,
    )
    unit = 52
    for panel, (title, sends, end) in enumerate(
        [
            ("by hand (lesson 4)", [(4 + k * 0.9, 0.9, f"r{k}") for k in range(4)], 7.6),
            ("DDP (lesson 6)", [(2, 1.5, "r0"), (4, 1.5, "r2")], 5.5),
        ]
    ):
        top = 100 + panel * 122
        canvas.text(MARGIN, top, title, "left")
        canvas.text(LEFT - 12, top + 35, "backward", "right soft")
        canvas.text(LEFT - 12, top + 75, "network", "right soft")
        for layer in range(4):
            colour = f"r{layer}" if panel == 0 else f"r{layer // 2 * 2}"
            canvas.box(
                LEFT + layer * unit, top + 14, unit - 3, 32, f"pale {colour}", f"layer {4 - layer}"
            )
        for number, (start, wide, colour) in enumerate(sends):
            words = "" if panel == 0 else f"bucket {number + 1}"
            canvas.box(LEFT + start * unit, top + 54, wide * unit - 3, 32, f"full {colour}", words)
        canvas.path([(LEFT + end * unit, top + 8), (LEFT + end * unit, top + 94)], "dash hot")
        canvas.text(LEFT + end * unit + 8, top + 55, "update", "left soft")
    canvas.arrow([(LEFT, 334), (WIDTH - MARGIN, 334)], "dim")
    canvas.text(WIDTH - MARGIN, 356, "time", "right soft")
    return canvas


def speed_up() -> Canvas:
    """Draw the time of a step on 1, 2 and 4 ranks, with the same global batch."""
    alt = "With the same global batch the computation of a step shrinks with the number of ranks, but the exchange does not: 4 ranks are 2.7 times as fast."
    canvas = Canvas(
        "Why four ranks are not four times as fast",
        "The same global batch: computing is shared, exchanging is not.",
        300,
        alt,
    )
    unit = 104
    for number, ranks in enumerate((1, 2, 4)):
        y, compute, send = 100 + number * 54, 4 / ranks, 0 if ranks == 1 else 0.5
        canvas.text(LEFT - 12, y + 22, f"{ranks} rank" + "s" * (ranks > 1), "right")
        canvas.box(LEFT, y, compute * unit - 3, 34, "pale r0", "compute")
        if send:
            canvas.box(LEFT + compute * unit, y, send * unit - 3, 34, "full hot")
        speed_up = 4 / (compute + send)
        words = f"speed-up {speed_up:.1f}, efficiency {100 * speed_up / ranks:.0f} %"
        x = LEFT + (compute + send) * unit + 8
        canvas.text(x, y + 22, words if ranks > 1 else "the reference", "left soft")
    canvas.box(LEFT, 262, 22, 16, "full hot")
    canvas.text(LEFT + 30, 275, "exchange and waiting (numbers of an example)", "left soft")
    return canvas


def global_batch() -> Canvas:
    """Draw the steps of an epoch on one and on four ranks, with the batch per rank kept and with the global batch kept."""
    alt = "Keeping the batch per rank makes the step four times as large and the steps a quarter; keeping the global batch keeps the training."
    canvas = Canvas(
        "Which batch stays the same?",
        "An epoch of 16 micro-batches; a frame is one update.",
        330,
        alt,
    )
    cell = 30
    rows = [
        ("1 rank", 1, 1, "16 updates: the reference"),
        ("4 ranks, batch per rank kept", 4, 4, "4 updates: another training"),
        ("4 ranks, global batch kept", 1, 4, "16 updates: the same training"),
    ]
    for number, (title, group, ranks, note) in enumerate(rows):
        y = 98 + number * 74
        canvas.text(MARGIN, y, title, "left")
        canvas.text(WIDTH - MARGIN, y, note, "right soft")
        for first in range(0, 16, group):
            x = MARGIN + first * (cell + 10.5)
            wide = group * (cell + 10.5) - 6
            canvas.box(x, y + 10, wide, 38, "open dim")
            for k in range(group):
                inner = x + 4 + k * (cell + 10.5)
                if group == 1 and ranks == 4:
                    for rank in range(4):
                        canvas.box(inner, y + 14 + rank * 7.6, cell - 3, 6, f"full r{rank}")
                else:
                    canvas.box(inner, y + 14, cell - 3, 30, f"pale r{k if ranks == 4 else 0}")
    canvas.text(
        WIDTH / 2,
        314,
        "Colours are ranks. Fewer, larger updates need another learning rate.",
        "soft",
    )
    return canvas


def accumulation() -> Canvas:
    """Draw the memory of one large batch and of four micro-batches."""
    alt = "Activations grow during forward and are freed in backward: four micro-batches need a quarter of the memory of the whole batch; gradients add up, then one update."
    canvas = Canvas(
        "Gradient accumulation", "Activations grow in forward and shrink in backward.", 350, alt
    )
    base, left, wide = 274, 84, 288
    canvas.path([(left, 196), (WIDTH - MARGIN, 196)], "dash hot")
    canvas.text(WIDTH - MARGIN, 188, "memory of the device", "right soft")
    canvas.area([(left, base), (left + wide / 2, 104), (left + wide, base)], "pale hot")
    canvas.text(left + wide / 2, 256, "the whole batch")
    for part in range(4):
        x = left + wide + 24 + part * 64
        canvas.area([(x, base), (x + 30, base - 44), (x + 60, base)], f"pale r{part}")
        canvas.text(x + 30, 294, f"part {part + 1}", "soft small")
    canvas.text(left + wide + 150, 140, "four micro-batches, one update")
    canvas.text(left + wide / 2, 294, "out of memory", "soft small")
    canvas.arrow([(left, base), (left, 92)], "dim")
    canvas.arrow([(left, base), (WIDTH - 20, base)], "dim")
    canvas.text(left - 8, 104, "memory", "right soft")
    canvas.text(
        WIDTH / 2,
        330,
        "Each part's loss is weighted by its share; gradients add up; the optimizer runs once.",
        "soft",
    )
    return canvas


def kill() -> Canvas:
    """Draw a rank that is killed in epoch 3, and the restart from the checkpoint after epoch 2."""
    alt = "Rank 1 is killed in epoch 3; rank 0 fails in its next collective; torchrun starts both again, they load the checkpoint of epoch 2 and repeat epoch 3."
    canvas = Canvas(
        "A killed rank",
        "What was saved is kept; what came after the checkpoint is repeated.",
        290,
        alt,
    )
    unit, left = 58, 104
    canvas.path([(left + 2 * unit - 1.5, 96), (left + 2 * unit - 1.5, 204)], "line r0")
    canvas.text(left + 2 * unit, 90, "saved", "soft small")
    for rank in range(2):
        y = 104 + rank * 50
        canvas.text(left - 14, y + 24, f"rank {rank}", "right")
        canvas.row(left, y, unit, 38, [(f"pale r{rank}", f"{epoch}") for epoch in (1, 2, 3)])
        canvas.row(left + 5.4 * unit, y, unit, 38, [(f"{'open' if epoch == 3 else 'pale'} r{rank}", f"{epoch}") for epoch in (3, 4, 5, 6)])  # fmt: skip
    x = left + 3 * unit + 12
    canvas.path([(x - 8, 165), (x + 8, 181)], "line hot")
    canvas.path([(x - 8, 181), (x + 8, 165)], "line hot")
    canvas.text(x + 14, 178, "killed", "left name hot")
    canvas.text(x - 2, 128, "fails, too", "left soft")
    canvas.arrow([(left + 2 * unit, 208), (left + 2 * unit, 226), (left + 5.9 * unit, 226), (left + 5.9 * unit, 196)], "r0")  # fmt: skip
    canvas.text(
        left + 4 * unit, 246, "torchrun starts all ranks again; they load the checkpoint", "soft"
    )
    canvas.text(
        WIDTH / 2,
        272,
        "Boxes are epochs; the dashed one is repeated, with the same losses.",
        "soft",
    )
    return canvas


def requeue() -> Canvas:
    """Draw a job that saves before its time limit, is requeued, and resumes."""
    alt = "Before the time limit Slurm sends a signal; the run saves and exits, the job is requeued, waits, starts again and resumes at the saved step."
    canvas = Canvas(
        "A time limit is not the end",
        "Saved before the limit, requeued, resumed at the same step.",
        300,
        alt,
    )
    y, left = 130, MARGIN + 10
    parts = [
        (0, 190, "pale r0", "job: train"), (190, 54, "full r0", "save"), (262, 118, "open dim", "waits in queue"),
        (398, 62, "full r1", "restore"), (460, 150, "pale r1", "same job: train"),
    ]  # fmt: skip
    for start, wide, kind, words in parts:
        canvas.box(left + start, y, wide - 3, 44, kind, words)
    canvas.path([(left + 250, 100), (left + 250, 190)], "dash hot")
    canvas.text(left + 250, 94, "time limit", "name hot small")
    canvas.arrow([(left + 190, 206), (left + 190, 178)], "hot")
    canvas.text(left + 190, 224, "a signal, shortly before", "soft")
    canvas.arrow([(left + 218, 236), (left + 218, 246), (left + 428, 246), (left + 428, 178)], "r0")
    canvas.text(left + 350, 238, "the checkpoint", "soft")
    for tick in (60, 120):
        canvas.path([(left + tick, 174), (left + tick, 186)], "line r0")
    canvas.text(left + 88, 204, "checkpoints", "soft small")
    canvas.arrow([(left, 270), (WIDTH - MARGIN, 270)], "dim")
    canvas.text(WIDTH - MARGIN, 290, "time", "right soft")
    return canvas


def hang() -> Canvas:
    """Draw two ranks that wait for each other in different collectives."""
    alt = "Rank 1 skips a batch, so it reaches the barrier while rank 0 still waits for its gradients: each waits for the other."
    canvas = Canvas(
        "A hang: who waits for whom",
        "Collectives pair up in order; after a skipped batch they no longer match.",
        320,
        alt,
    )
    unit, left = 58, 110
    for rank in range(2):
        y = 104 + rank * 90
        canvas.text(left - 14, y + 26, f"rank {rank}", f"right name r{rank}")
    canvas.row(left, 104, unit, 42, [("pale r0", f"{k}") for k in (1, 2, 3, 4, 5)])
    canvas.box(left + 5 * unit + 2, 104, 190, 42, "full hot", "backward: gradient 6")
    canvas.row(
        left,
        194,
        unit,
        42,
        [("open dim", "skipped"), *[("pale r1", f"{k}") for k in (1, 2, 3, 4, 5)]],
    )
    canvas.box(left + 6 * unit + 2, 194, 190, 42, "full hot", "barrier")
    canvas.arrow([(left + 5 * unit + 112, 150), (left + 6 * unit + 86, 190)], "hot")
    canvas.text(left + 5 * unit + 112, 176, "waits for", "right name hot")
    canvas.arrow([(left + 6 * unit + 164, 190), (left + 5 * unit + 178, 150)], "hot")
    canvas.text(left + 6 * unit + 162, 176, "waits for", "left name hot")
    for k in range(5):
        canvas.path([(left + (k + 0.5) * unit, 147), (left + (k + 1.5) * unit, 193)], "dash dim")
    canvas.text(
        WIDTH / 2,
        272,
        "Boxes are gradients that are summed; dashed lines are pairs of one collective.",
        "soft",
    )
    canvas.text(
        WIDTH / 2,
        296,
        "Nothing fails and nothing moves: only the stacks of all ranks show the cause.",
        "soft",
    )
    return canvas


def pipeline() -> Canvas:
    """Draw four stages and four micro-batches, with the time in which stages wait."""
    alt = "A pipeline of four stages and four micro-batches: each stage waits for three of seven time slots in forward and in backward."
    stages, micro = 4, 4
    canvas = Canvas(
        "The bubble of a pipeline",
        "A stage waits until the first micro-batch arrives, and after its last one has left.",
        356,
        alt,
    )
    cell, left, top = 41, 108, 96
    for stage in range(stages):
        y = top + stage * 44
        canvas.text(left - 12, y + 24, f"stage {stage}", "right")
        slots: list[tuple[str, str]] = [("open dim", "")] * (2 * (micro + stages - 1))
        for k in range(micro):
            slots[stage + k] = ("pale r1", f"F{k}")
            slots[len(slots) - 1 - stage - (micro - 1 - k)] = ("full r0", f"B{k}")
        canvas.row(left, y, cell, 36, slots)
    canvas.text(
        left,
        296,
        "F forward, B backward, of micro-batches 0 to 3; dashed: the stage waits",
        "left soft",
    )
    share = (stages - 1) / (micro + stages - 1)
    canvas.text(
        WIDTH / 2,
        332,
        f"Bubble: (stages - 1) / (micro-batches + stages - 1) = 3/7 = {100 * share:.0f} %; with 32 micro-batches 9 %.",
        "soft",
    )
    return canvas
