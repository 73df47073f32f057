"""The state of an optimizer gets the names of the weights only where they are certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.importing.layouts import contents_of
from paceline.checkpoint.importing.optimizer_state import name_state
from paceline.checkpoint.importing.stored_tensor import StoredTensor
from paceline.checkpoint.importing.write import _split

MATRIX, VECTOR = (4, 4), (4,)


def tensor(shape: tuple[int, ...], begin: int = 0, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(dtype, shape, 4, Path("file"), begin)


def weights_of(**shapes: tuple[int, ...]) -> dict[str, StoredTensor]:
    return {name: tensor(shape, number) for number, (name, shape) in enumerate(shapes.items())}


def momenta(shapes: list[tuple[int, ...]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What `state_dict()` of an SGD returns; the byte offset of a momentum is its number."""
    state = {}
    for number, shape in enumerate(shapes):
        state[number] = {"momentum_buffer": tensor(shape, number)}
    return {"state": state, "param_groups": groups}


def names_by_number(saved: Any, weights: dict[str, StoredTensor], **how: bool) -> Any:
    """The name of each momentum by its number, or the reason why there are none."""
    state = name_state([saved], weights, ordered=how.get("ordered", True))
    found = {value.begin: name.partition(".")[2] for name, value in state.tensors.items()}
    return found or state.left_out


NET = weights_of(a=MATRIX, b=VECTOR, c=MATRIX, d=VECTOR)
ONE = [{"params": [0, 1, 2, 3], "lr": 0.1}]
DECAY = [{"params": [0, 1], "lr": 0.1}, {"params": [2, 3], "lr": 0.2}]


def test_one_group_is_in_the_order_of_the_weights() -> None:
    saved = momenta([MATRIX, VECTOR, MATRIX, VECTOR], ONE)
    assert names_by_number(saved, NET) == {0: "a", 1: "b", 2: "c", 3: "d"}


def test_groups_of_other_shapes_are_told_apart() -> None:
    saved = momenta([MATRIX, MATRIX, VECTOR, VECTOR], DECAY)
    assert names_by_number(saved, NET) == {0: "a", 1: "c", 2: "b", 3: "d"}


def test_buffers_and_tied_weights_are_not_counted() -> None:
    weights = {**NET, "tied": NET["a"], "n.running_mean": tensor(VECTOR, 9)}
    weights["n.num_batches_tracked"] = tensor((), 10, "I64")
    saved = momenta([MATRIX, VECTOR, MATRIX, VECTOR], ONE)
    assert names_by_number(saved, weights) == {0: "a", 1: "b", 2: "c", 3: "d"}


def test_names_in_the_groups_come_first() -> None:
    groups = [{"params": [0, 1], "param_names": ["module.d", "module.b"]}]
    assert names_by_number(momenta([VECTOR, VECTOR], groups), NET) == {0: "d", 1: "b"}


def test_a_state_by_name_keeps_its_names() -> None:
    saved = {"state": {"c": {"m": tensor(MATRIX)}}, "param_groups": [{"params": ["a", "c"]}]}
    assert names_by_number(saved, NET) == {0: "c"}


def test_a_frozen_parameter_has_no_state() -> None:
    saved = momenta([MATRIX, VECTOR, MATRIX, VECTOR], ONE)
    del saved["state"][1]
    assert names_by_number(saved, NET) == {0: "a", 2: "c", 3: "d"}


LEFT_OUT = [
    (momenta([MATRIX, VECTOR], [{"params": [0, 1]}]), True, "it has 2 parameters, the weights have 4; build"),
    (momenta([VECTOR, MATRIX, VECTOR, MATRIX], ONE), True, "parameter 0 has the shape [4], the weight a has [4, 4]"),
    (momenta([MATRIX, VECTOR, MATRIX, VECTOR], DECAY), True, "its groups share the shape [4, 4]"),
    (momenta([VECTOR, MATRIX, VECTOR, MATRIX], ONE), False, "2 weights have the shape [4], and safetensors does not keep"),
    (momenta([MATRIX], [{"params": [0], "param_names": ["x"]}]), True, "its parameter x is not among the weights"),
    ({"state": {0: {"row": tensor((4, 1)), "col": tensor((1, 4))}}, "param_groups": ONE}, True, "the shapes [1, 4] and [4, 1]"),
    ({"state": {0: {"old": [1]}}, "param_groups": ONE}, True, "its state old is a list, not a tensor or a number"),
    ({"state": {}, "param_groups": ONE}, True, "it is empty"),
    ({"lr": 1}, True, "it is not what optimizer.state_dict() returns"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "ordered", "reason"), LEFT_OUT, ids=[case[2] for case in LEFT_OUT]
)
def test_a_state_without_certain_names_is_left_out_with_the_reason(
    saved: Any, ordered: bool, reason: str
) -> None:
    assert reason in names_by_number(saved, NET, ordered=ordered)


def test_several_optimizers_are_left_out() -> None:
    assert (
        name_state([{}, {}], NET, ordered=True).left_out == "there are 2 optimizers, a run has one"
    )


def test_python_numbers_keep_type_and_value() -> None:
    saved = {"state": {"a": {"step": 7, "mean": 0.5, "none": None}}, "param_groups": [{"params": ["a"]}]}  # fmt: skip
    state = name_state([saved], NET, ordered=True)
    assert state.numbers == {"step.a": "int", "mean.a": "float"}
    assert state.tensors["step.a"].content == (7).to_bytes(8, "little")
    assert state.tensors["step.a"].dtype == "I64"


def test_a_key_named_like_a_part_may_be_a_weight() -> None:
    found = contents_of({"model": tensor(VECTOR), "step": tensor(())}, Path("net.pt"))
    assert (found.layout, list(found.weights), found.step) == ("state dict", ["model", "step"], 0)


def test_large_checkpoints_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.importing.write._PART_BYTES", 10)
    assert [len(part) for part in _split(NET)] == [2, 2]
