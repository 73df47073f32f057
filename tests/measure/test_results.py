"""Every result is looked at: what is right passes on any number of ranks, and no kind of mistake goes unseen."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from paceline.measure.bench_plan import OPERATIONS, BenchPlan
from support.processes import run_on_processes

ANY = {"batch.lanes": 64}
SIZES = (4, 100, 4096, 262_144 + 4)
"""Less than a number a rank, odd pieces, small enough for one message, large enough for slices of the tree."""


def measured(world) -> dict:
    from paceline.measure.bench import Bench

    found = Bench(BenchPlan(tuple(OPERATIONS), SIZES, 0.0), world).run()
    names = [(each.operation, each.size_bytes) for each in found.measured]
    rounds = {len(each.seconds) for each in found.measured}
    facts = {"wrong": found.wrong, "checked": found.checked, "ranks": found.ranks}
    return facts | {"names": names, "rounds": rounds}


def test_every_operation_is_right_at_every_size(tmp_path: Path) -> None:
    ranks = 3
    found = run_on_processes(measured, ranks, tmp_path, ANY)
    assert found == [found[0]] * ranks
    assert (found[0]["wrong"], found[0]["ranks"], found[0]["rounds"]) == (0, ranks, {3})
    assert {name for name, _ in found[0]["names"]} == set(OPERATIONS)
    # Two before the rounds, and two or more in each of three.
    assert found[0]["checked"] >= ranks * 5 * len(SIZES) * 8
    sizes = [size for name, size in found[0]["names"] if name == "all-gather"]
    assert sizes == [max(4 * ranks, size // 4 // ranks * ranks * 4) for size in SIZES]


def a_rank_left_out(run, sent, received, rank, piece):
    if rank == 1:
        received.zero_()
    run(sent, received)


def a_rank_twice(run, sent, received, rank, piece):
    run(sent, received)
    received[piece : 2 * piece] = received[:piece]


def slices_in_another_order(run, sent, received, rank, piece):
    run(sent, received)
    received.copy_(received.roll(piece))


def the_slice_of_another_rank(run, sent, received, rank, piece):
    run(sent.roll(piece), received)


def one_number_of_one_rank(run, sent, received, rank, piece):
    run(sent, received)
    received[7] += rank == 2


def nothing_comes(run, sent, received, rank, piece):
    pass


def what_came_before(run, sent, received, rank, piece, held=[]):  # noqa: B006 - what it is about
    run(sent, received)
    held.append(received.clone())
    received.copy_(held[0])


MISTAKES = [
    ("all-reduce", a_rank_left_out, {0, 1, 2}),
    ("all-reduce", nothing_comes, {0, 1, 2}),
    ("all-reduce", one_number_of_one_rank, {2}),
    ("all-gather", a_rank_twice, {0, 1, 2}),
    ("all-gather", slices_in_another_order, {0, 1, 2}),
    ("reduce-scatter", the_slice_of_another_rank, {0, 1, 2}),
    ("all-to-all", slices_in_another_order, {0, 1, 2}),
    ("all-to-all", the_slice_of_another_rank, {0, 1, 2}),
    ("tree", what_came_before, {0, 1, 2}),
    ("pair", nothing_comes, {0, 2}),
]


def seen_of(world, number: int) -> tuple[int, set[int], str]:
    from paceline.measure import bench

    name, mistake, _ = MISTAKES[number]
    make = bench.make_operation

    def broken(*words):
        operation = make(*words)
        given = {"rank": world.rank, "piece": 1024 // world.size}
        return dataclasses.replace(operation, run=partial(mistake, operation.run, **given))

    bench.make_operation = broken
    try:
        found = bench.Bench(BenchPlan((name,), (4096,), 0.0), world).run()
    finally:
        bench.make_operation = make
    return found.wrong, {each.rank for each in found.mistakes}, found.mistakes[0].operation


def all_mistakes(world) -> list:
    return [seen_of(world, number) for number in range(len(MISTAKES))]


def test_no_mistake_goes_unseen(tmp_path: Path) -> None:
    for found in run_on_processes(all_mistakes, 3, tmp_path, ANY):
        for (wrong, ranks, _), (name, mistake, expected) in zip(found, MISTAKES, strict=True):
            assert wrong > 0, (name, mistake)
            assert ranks == expected, (name, mistake)
