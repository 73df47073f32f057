"""The sum of lanes has the same bits on every rank of every world, whatever carries it."""

import pytest
import torch
from torch import nn

from paceline.exact import exchange
from paceline.exact.buckets import LaneStack
from paceline.exact.exchange import AllGatherExchange, AllToAllExchange, TreeShape, choose_exchange
from paceline.exact.row import merge_rows
from paceline.scale.tree import merges_after
from paceline.world.world import World
from support.lane_sums import lane_values, sums_of_rank, tree_sum
from support.loops import fit
from support.processes import in_worlds, on_processes


def exchanged(world: World, lanes: int, size: int, dtype: torch.dtype, way: str) -> torch.Tensor:
    """This rank's lanes through one exchange, added within the rank by the definition."""
    sums = sums_of_rank(lane_values(lanes, size, dtype), world.rank, world.size)
    shape, total = TreeShape.of(lanes, world), torch.empty(size, dtype=dtype)
    if way == "gather":
        notes = [torch.full((3,), float(row)) for row in range(len(sums))]
        bucket = AllGatherExchange(total, 3, shape, torch.device("cpu"))
        bucket.start(sums, [note.double() for note in notes])
    else:
        bucket = AllToAllExchange(total, shape, torch.device("cpu"))
        bucket.start(sums, [])
    while not bucket.advance(total):
        pass
    return total


@on_processes(3)
def test_gather_and_slices_give_the_bits_of_the_tree_on_three_ranks(world: World) -> None:
    for lanes in (3, 4, 5, 7, 8):
        for size in (1, 2, 10, 1001):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                expected = tree_sum(lane_values(lanes, size, dtype), range(lanes))
                for way in ("gather", "slices"):
                    assert torch.equal(exchanged(world, lanes, size, dtype, way), expected), (
                        lanes,
                        size,
                        dtype,
                        way,
                    )


def test_two_ranks_and_small_buckets_gather_and_large_ones_go_in_slices() -> None:
    cpu = torch.device("cpu")
    three, two = TreeShape.of(4, World(size=3)), TreeShape.of(4, World(size=2))
    large, small = torch.empty(1 << 18), torch.empty(10)
    assert isinstance(choose_exchange(large, 0, two, cpu), AllGatherExchange)
    assert isinstance(choose_exchange(small, 0, three, cpu), AllGatherExchange)
    assert isinstance(choose_exchange(large, 0, three, cpu), AllToAllExchange)


def gradients(config, world, *, wide: int, tiny_buckets: bool) -> str:
    """Some steps of a model with several buckets; the digest of what was learned."""
    if tiny_buckets:
        # every bucket goes in slices, notes on their own
        exchange._SMALL_BYTES = exchange._CARRIES_ROWS_BYTES = 64
    model = nn.Sequential(
        nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1)
    )
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(37, 8, generator=generator), torch.randn(37, 1, generator=generator)
    return fit(world, config, model, data, optimizer=adamw).digest


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize(
    "lanes", [5, *(pytest.param(lanes, marks=pytest.mark.heavy) for lanes in (4, 8))]
)
@pytest.mark.parametrize("tiny", [False, True], ids=["gathered", "in slices"])
def test_a_model_of_several_buckets_learns_the_same_bits_on_one_to_four_ranks(
    lanes: int, tiny: bool, tmp_path
) -> None:
    settings = {"batch.lanes": lanes, "batch.global_size": 20, "epochs": 2, "clip_norm": 0.5}
    given = {"wide": 700, "tiny_buckets": tiny}
    in_worlds(
        gradients, tmp_path, settings, given, worlds=(1, 2, 3, 4) if lanes != 5 else (1, 3, 4)
    )


def test_rows_and_gradients_are_added_along_the_tree() -> None:
    weight = nn.Parameter(torch.zeros(1))
    stack = LaneStack([weight], merges_after(range(6), 6))
    values = [torch.tensor([10.0**lane / 3]) for lane in range(6)]
    for value in values:
        stack.before_lane()
        weight.grad = (
            value.clone() if weight.grad is None else weight.grad.add_(value)
        )  # what backward does
        stack.push(stack.after_lane())
    assert [sums[0] for sums in stack.sums] == [tree_sum(values, range(6))]
    rows = torch.stack([value.double() for value in values])
    assert merge_rows(rows, merges_after(range(6), 6))[0].item() == float(
        tree_sum([value.double() for value in values], range(6))
    )
