"""The first difference of two records, its cause, and its text: tables, no processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.cli.verify import worlds_from
from paceline.errors import ConfigError, PacelineError
from paceline.rundir import RECORD_FILE
from paceline.verify.compare_worlds import find_cause
from paceline.verify.records import LOSS, Record, RecordedStep, first_difference, read_record
from paceline.verify.verdict import CAUSES, Difference, VerifyResult, as_dict, describe

START = RecordedStep(0, math.nan, 0, ranks_agree=True, generators=[1], tensors={"a": "1", "b": "1"})


def after(step: int = 1, loss: float = 0.5, samples: int = 7, *, agree: bool = True, drew: bool = False, rank_draws: bool = False, a: str = "2", b: str = "2") -> RecordedStep:  # fmt: skip
    return RecordedStep(
        step, loss, samples, agree, [2] if drew else [3, 4] if rank_draws else [1], {"a": a, "b": b}
    )


def record(*steps: RecordedStep, world: int = 1, norms: tuple[str, ...] = ()) -> Record:
    return Record(world, exact=True, norms=list(norms), epsilon=1e-7, steps=[START, *steps])


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (record(after()), record(after()), None),
        (record(after()), record(after(b="9")), (1, "b")),
        (record(after()), record(after(a="9", b="9")), (1, "a")),
        (record(after()), record(after(samples=8, drew=True)), None),
        (record(after()), record(after(loss=0.5 + 2e-16, b="9")), (1, LOSS)),
        (record(after(), after(2)), record(after(), after(2, a="9")), (2, "a")),
        (record(after()), record(after(agree=False)), (1, "the weights of different ranks")),
        (record(after()), record(after(), after(2)), (1, "the number of steps")),
    ],
)
def test_records_part_here(one: Record, other: Record, where: tuple[int, str] | None) -> None:
    assert first_difference(one, other) == where


FAR, NEAR = 0.1, 1e-7
NORMS = ("BatchNorm1d",)


@pytest.mark.parametrize(
    ("one", "other", "step", "relative", "cause"),
    [
        (record(after()), record(after()), 0, FAR, "first_weights"),
        (record(after()), record(after(samples=8)), 1, FAR, "data_order"),
        (record(after()), record(after(samples=8, agree=False)), 1, FAR, "data_order"),
        (record(after()), record(after(agree=False)), 1, FAR, "ranks_diverge"),
        (record(after()), record(after(loss=0.6)), 1, FAR, "mean_of_means"),
        (record(after(drew=True)), record(after(loss=0.6, rank_draws=True)), 1, FAR, "randomness"),
        (record(after(drew=True)), record(after(loss=0.6, drew=True)), 1, FAR, "mean_of_means"),
        (record(after()), record(after(loss=math.nan)), 1, math.inf, "mean_of_means"),
        (record(after()), record(after(a="9")), 1, FAR, "update"),
        (record(after(), norms=NORMS), record(after(loss=0.6), norms=NORMS), 1, FAR, "batchnorm"),
        (record(after()), record(after(a="9")), 1, NEAR, "summation"),
        (record(after()), record(after(loss=0.5 + 1e-8)), 1, NEAR, "summation"),
        (
            record(after(drew=True), norms=NORMS),
            record(after(a="9", drew=True), norms=NORMS),
            1,
            NEAR,
            "summation",
        ),
    ],
)
def test_a_difference_has_this_cause(
    one: Record, other: Record, step: int, relative: float, cause: str
) -> None:
    assert find_cause(one, other, step, relative) == cause
    assert cause in CAUSES


def test_a_verdict_of_yes_is_said_in_words() -> None:
    verdict = VerifyResult(True, "x.py", [1, 2], 3, 4, {1: "ab" * 32, 2: "ab" * 32})
    assert (
        describe(verdict).splitlines()[0]
        == "x.py: 3 steps, 4 tensors of weights and optimizer state, and the losses"
    )
    assert describe(verdict).endswith("  2 ranks  abababababababab\nthe same bits")


@pytest.mark.parametrize(
    ("step", "where"),
    [(0, "first difference: before the first step, a"), (2, "first difference: step 2, a")],
)
def test_a_verdict_of_no_names_step_tensor_size_cause_and_fix(step: int, where: str) -> None:
    difference = Difference(2, step, "a", 0.25, 0.5, "summation")
    text = describe(
        VerifyResult(False, "x.py", [1, 2], 3, 4, {1: "a" * 64, 2: "b" * 64}, difference=difference)
    )
    for words in (
        "world size 2 differs from world size 1",
        where,
        "up to 0.25, relative 0.5",
        *CAUSES["summation"],
    ):
        assert words in text


def test_a_verdict_within_tolerance_states_both_numbers() -> None:
    verdict = VerifyResult(
        True, "x.py", [1, 2], 3, 4, {1: "a", 2: "b"}, tolerance=1e-3, largest_relative=2.5e-5
    )
    assert describe(verdict).endswith("largest relative difference 2.5e-05 (allowed 1e-03)")


def test_a_verdict_is_plain_json() -> None:
    difference = Difference(2, 1, "a", 0.25, 0.5, "batchnorm")
    found = json.loads(
        json.dumps(
            as_dict(
                VerifyResult(False, "x.py", [1, 2], 3, 4, {1: "a", 2: "b"}, difference=difference)
            )
        )
    )
    assert found["digests"] == {"1": "a", "2": "b"}
    assert found["difference"]["fix"] == CAUSES["batchnorm"][1]


@pytest.mark.parametrize("text", ["", "1", "1,", "0,1", "1,-2", "1,two", "1.5,2", "1,1", "2,1,2"])
def test_what_is_no_list_of_worlds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        worlds_from(text)
    assert refused.value.fix == "give at least two, such as --worlds 1,2,4"


HEAD = '{"world": 1, "exact": true, "norms": [], "epsilon": 0.0}\n'
LINE = '{"step": 0, "loss": "nan", "samples": 0, "ranks_agree": true, "generators": [1], "tensors": {}}\n'


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (None, "train inside `with paceline.Run(config) as run`"),
        (HEAD, "loop over `run.steps(...)`"),
        (HEAD + LINE, "loop over `run.steps(...)`"),
    ],
)
def test_a_record_without_steps_is_refused(tmp_path: Path, content: str | None, fix: str) -> None:
    if content is not None:
        (tmp_path / RECORD_FILE).write_text(content)
    with pytest.raises(PacelineError) as refused:
        read_record(tmp_path, "x.py")
    assert fix in refused.value.fix
