"""Every sample of an epoch is used exactly once, in the same order for all worlds."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import samples_at
from paceline.scale.batch import BatchPlan, share, split_evenly
from paceline.scale.tree import additions, children, merges_after, whole_subtrees


@st.composite
def worlds(draw):
    lanes = draw(st.integers(1, 16))
    return {
        "samples": draw(st.integers(1, 600)),
        "lanes": lanes,
        "size": draw(st.integers(1, lanes)),
        "global_size": draw(st.integers(lanes, 200)),
        "epoch": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


def order_of_an_epoch(samples, lanes, size, global_size, epoch, seed):
    """The samples of an epoch as the ranks read them: step by step, lane by lane."""
    plans = [BatchPlan(samples, global_size, lanes, rank, size) for rank in range(size)]
    steps = range(epoch * plans[0].steps_per_epoch, (epoch + 1) * plans[0].steps_per_epoch)
    order = []
    for step in steps:
        found = [lane for plan in plans for lane in plan.step(step).lanes]
        assert [lane.lane for lane in found] == list(range(lanes))
        assert sum(lane.samples for lane in found) == plans[0].step(step).samples
        assert max(lane.samples for lane in found) - min(lane.samples for lane in found) <= 1
        assert all(len(lane.places) >= 1 for lane in found)
        order += [place for lane in found if lane.samples for place in lane.places]
    return samples_at(numpy.array(order), samples, seed, epoch).tolist()


@settings(max_examples=500)
@given(worlds())
def test_every_sample_once_and_the_same_order_for_all_worlds(case):
    order = order_of_an_epoch(**case)
    assert sorted(order) == list(range(case["samples"]))
    assert order == order_of_an_epoch(**case | {"size": 1})


@given(st.integers(1, 64).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes))))
def test_lanes_are_shared_contiguously_and_as_even_as_they_go(case):
    lanes, size = case
    shares = [share(lanes, rank, size) for rank in range(size)]
    assert [lane for mine in shares for lane in mine] == list(range(lanes))
    assert {len(mine) for mine in shares} <= {lanes // size, -(-lanes // size)}


@given(st.integers(0, 1000), st.integers(1, 50))
def test_an_even_split_loses_nothing(amount, parts):
    assert sum(split_evenly(amount, parts)) == amount


def as_text(node, names):
    """The definition of the tree, spelled out with brackets."""
    if len(node) == 1:
        return names[node.start]
    left, right = children(node)
    return f"({as_text(left, names)}+{as_text(right, names)})"


@given(st.integers(1, 40).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes))))
def test_stacks_of_ranks_and_the_additions_between_them_spell_the_same_tree(case):
    lanes, size = case
    rows, nodes = [], []
    for rank in range(size):
        mine = share(lanes, rank, size)
        stack = []
        for lane, merges in zip(mine, merges_after(mine, lanes), strict=True):
            stack.append(str(lane))
            for _ in range(merges):
                newest = stack.pop()
                stack[-1] = f"({stack[-1]}+{newest})"
        rows += stack
        nodes += whole_subtrees(mine, lanes)
    assert len(rows) == len(nodes)
    for to, source in additions(nodes, lanes):
        rows[to] = f"({rows[to]}+{rows[source]})"
    assert rows[0] == as_text(range(lanes), [str(lane) for lane in range(lanes)])
