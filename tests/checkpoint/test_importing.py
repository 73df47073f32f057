"""The state of an optimizer keeps names where the file has them, and otherwise the places of its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.importing.layouts import contents_of
from paceline.checkpoint.importing.optimizer_state import read_optimizers
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


def names_by_number(saved: Any, weights: dict[str, StoredTensor]) -> Any:
    """The name or place of each momentum by its number, or the reason why there are none."""
    state = read_optimizers([saved], weights, "module.")
    found = {value.begin: name.partition(".")[2] for name, value in state.tensors.items()}
    return found or state.left_out


NET = weights_of(a=MATRIX, b=VECTOR, c=MATRIX, d=VECTOR)
ONE = [{"params": [0, 1, 2, 3], "lr": 0.1}]


def test_parameters_are_told_by_their_places_and_shapes() -> None:
    saved = momenta([MATRIX, VECTOR, MATRIX, VECTOR], ONE)
    del saved["state"][1]  # a frozen parameter
    state = read_optimizers([saved], NET, "")
    assert names_by_number(saved, NET) == {0: "#0.0", 2: "#0.2", 3: "#0.3"}
    assert state.places == (((MATRIX, None, MATRIX, VECTOR),),)


def test_names_in_the_groups_come_first() -> None:
    groups = [{"params": [0, 1], "param_names": ["module.d", "module.b"]}]
    assert names_by_number(momenta([VECTOR, VECTOR], groups), NET) == {0: "d", 1: "b"}


def test_a_state_by_name_keeps_its_names() -> None:
    saved = {"state": {"c": {"m": tensor(MATRIX)}}, "param_groups": [{"params": ["a", "c"]}]}
    assert names_by_number(saved, NET) == {0: "c"}


LEFT_OUT = [
    (momenta([MATRIX], [{"params": [0], "param_names": ["x"]}]), "its parameter x is not among the weights"),
    (momenta([VECTOR], [{"params": [0], "param_names": ["a"]}]), "shape [4], not [4, 4]"),
    ({"state": {0: {"old": [1]}}, "param_groups": ONE}, "its state old is a list"),
    ({"state": {9: {}}, "param_groups": ONE}, "parameter 9"),
    ({"state": {}, "param_groups": ONE}, "it is empty"),
    ({"lr": 1}, "optimizer.state_dict()"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "reason"), LEFT_OUT, ids=[case[1] for case in LEFT_OUT])
def test_a_state_that_cannot_be_read_is_left_out_with_the_reason(saved: Any, reason: str) -> None:
    assert reason in names_by_number(saved, NET)


def test_python_numbers_keep_type_and_value() -> None:
    saved = {"state": {"a": {"step": 7, "mean": 0.5, "none": None}}, "param_groups": [{"params": ["a"]}]}  # fmt: skip
    state = read_optimizers([saved], NET, "")
    assert state.numbers == {"step.a": "int", "mean.a": "float"}
    assert state.tensors["step.a"].content == (7).to_bytes(8, "little")
    assert state.tensors["step.a"].dtype == "I64"


def test_a_key_named_like_a_part_may_be_a_weight() -> None:
    found = contents_of({"model": tensor(VECTOR), "step": tensor(())}, Path("net.pt"))
    assert (found.layout, list(found.weights), found.step) == ("state dict", ["model", "step"], 0)


def test_large_checkpoints_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.importing.write._PART_BYTES", 10)
    assert [len(part) for part in _split(NET)] == [2, 2]
